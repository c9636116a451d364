"""Ownership of blocks."""

from __future__ import annotations

import pytest

from pegainfer.kvcache.block_pool import BlockPool


@pytest.fixture
def evicted() -> list[int]:
    return []


@pytest.fixture
def pool(evicted: list[int]) -> BlockPool:
    return BlockPool(4, evicted.append)


def test_a_block_is_free_used_or_cached(pool: BlockPool) -> None:
    first, second = pool.allocate(2)
    assert (pool.num_used, pool.num_available) == (2, 2)
    pool.release(first, keep=True)
    pool.release(second, keep=False)
    assert (pool.num_used, pool.num_available, list(pool.cached)) == (0, 4, [first])
    pool.check_integrity([])


def test_the_least_recently_used_cached_block_is_evicted_when_none_is_free(
    pool: BlockPool, evicted: list[int]
) -> None:
    blocks = pool.allocate(4)
    for block in (blocks[2], blocks[0], blocks[1]):
        pool.release(block, keep=True)
    pool.release(blocks[3], keep=False)
    assert pool.allocate(1) == [blocks[3]]
    assert evicted == []
    assert pool.allocate(2) == [blocks[2], blocks[0]]
    assert evicted == [blocks[2], blocks[0]]


def test_using_a_cached_block_again_makes_it_the_most_recent(pool: BlockPool, evicted: list[int]) -> None:
    blocks = pool.allocate(4)
    for block in blocks:
        pool.release(block, keep=True)
    pool.share(blocks[0])
    assert pool.num_used == 1
    pool.release(blocks[0], keep=True)
    assert pool.allocate(4) == [*blocks[1:], blocks[0]]


def test_a_shared_block_stays_until_its_last_user_leaves(pool: BlockPool) -> None:
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.release(block, keep=True)
    assert pool.num_used == 1
    pool.check_integrity([[block]])
    pool.release(block, keep=True)
    assert pool.num_used == 0


def test_releasing_twice_is_an_error(pool: BlockPool) -> None:
    (block,) = pool.allocate(1)
    pool.release(block, keep=False)
    with pytest.raises(RuntimeError, match="without a user"):
        pool.release(block, keep=False)
    pool.check_integrity([])


def test_asking_for_too_many_is_an_error_and_takes_nothing(pool: BlockPool) -> None:
    with pytest.raises(RuntimeError, match="5 blocks"):
        pool.allocate(5)
    assert pool.num_available == 4


def test_integrity_notices_wrong_counts(pool: BlockPool) -> None:
    (block,) = pool.allocate(1)
    with pytest.raises(RuntimeError, match="counts 1 users"):
        pool.check_integrity([])
    with pytest.raises(RuntimeError, match="2 times"):
        pool.check_integrity([[block], [block]])
    pool.check_integrity([[block]])


def test_evict_all_frees_what_nobody_uses(pool: BlockPool, evicted: list[int]) -> None:
    kept, dropped = pool.allocate(2)
    pool.release(dropped, keep=True)
    pool.evict_all()
    assert evicted == [dropped]
    assert not pool.cached
    pool.check_integrity([[kept]])
