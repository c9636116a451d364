"""Block tables of requests."""

from __future__ import annotations

import pytest

from pegainfer.kvcache.manager import BlockTable, KvCacheManager

BLOCK = 16


def start(
    cache: KvCacheManager, token_ids: list[int], *, salt: str | None = None, reserve: int = 0
) -> BlockTable | None:
    chain = cache.make_chain(salt)
    found = cache.find(chain, token_ids)
    return cache.open(chain, len(token_ids), num_cached_tokens=found, reserve=reserve)


def compute(cache: KvCacheManager, token_ids: list[int], *, salt: str | None = None) -> int:
    """Serve a whole prompt; how many of its tokens were cached."""
    table = start(cache, token_ids, salt=salt)
    assert table is not None
    cache.commit(table, token_ids, len(token_ids))
    cache.close(table)
    cache.check_integrity()
    return table.num_cached_tokens


@pytest.mark.parametrize(
    ("length", "hit"), [(1, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_t11_the_last_token_is_never_found(length: int, hit: int) -> None:
    cache = KvCacheManager(8, BLOCK)
    token_ids = list(range(length))
    assert compute(cache, token_ids) == 0
    assert compute(cache, token_ids) == hit


def test_t11_another_token_or_salt_finds_nothing() -> None:
    cache = KvCacheManager(8, BLOCK)
    token_ids = list(range(33))
    compute(cache, token_ids, salt="a")
    assert compute(cache, token_ids) == 0
    assert compute(cache, token_ids, salt="b") == 0
    assert compute(cache, token_ids, salt="a") == 32
    assert compute(cache, [*token_ids[:3], 99, *token_ids[4:]], salt="a") == 0
    assert compute(cache, [*token_ids[:20], 99, *token_ids[21:]], salt="a") == 16


def test_only_computed_blocks_are_found() -> None:
    cache = KvCacheManager(8, BLOCK)
    token_ids = list(range(64))
    table = start(cache, token_ids)
    assert table is not None
    cache.commit(table, token_ids, 31)
    assert cache.find(cache.make_chain(None), token_ids) == 16
    cache.commit(table, token_ids, 48)
    assert cache.find(cache.make_chain(None), token_ids) == 48
    assert cache.find(cache.make_chain(None), token_ids[:48]) == 32
    cache.close(table)
    cache.check_integrity()


def test_requests_that_run_together_share_blocks() -> None:
    cache = KvCacheManager(8, BLOCK)
    token_ids = list(range(40))
    first = start(cache, token_ids)
    assert first is not None
    cache.commit(first, token_ids, 40)
    second = start(cache, token_ids)
    assert second is not None
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert cache.num_used == 4
    cache.close(first)
    cache.check_integrity()
    assert cache.num_used == 3
    cache.close(second)
    assert cache.num_used == 0


def test_the_ends_of_prefixes_are_evicted_first() -> None:
    cache = KvCacheManager(4, BLOCK)
    token_ids = list(range(64))
    compute(cache, token_ids)
    assert compute(cache, [1000, *range(15)]) == 0
    assert compute(cache, token_ids) == 48
    compute(cache, list(range(2000, 2032)))
    assert compute(cache, token_ids) == 32


def test_opening_counts_found_blocks_that_nobody_uses_as_taken() -> None:
    cache = KvCacheManager(4, BLOCK)
    token_ids = list(range(48))
    compute(cache, token_ids)
    assert start(cache, [*token_ids, *range(100, 130)]) is None
    cache.check_integrity()
    table = start(cache, [*token_ids, 100])
    assert table is not None
    assert table.num_cached_tokens == 48
    assert cache.num_available == 0


def test_a_reserve_stays_available() -> None:
    cache = KvCacheManager(4, BLOCK)
    assert start(cache, list(range(48)), reserve=2) is None
    assert start(cache, list(range(32)), reserve=2) is not None


def test_growing_appends_blocks_and_says_when_there_are_none() -> None:
    cache = KvCacheManager(3, BLOCK)
    table = start(cache, list(range(16)))
    assert table is not None
    assert cache.grow(table, 16) == []
    added = cache.grow(table, 17)
    assert added == table.block_ids[1:]
    assert table.num_slots == 32
    assert cache.grow(table, 49) is None
    assert cache.num_used == 2
    assert cache.usage == pytest.approx(2 / 3)


def test_decoded_blocks_are_cached_too() -> None:
    cache = KvCacheManager(4, BLOCK)
    token_ids = list(range(20))
    table = start(cache, token_ids)
    assert table is not None
    token_ids += range(500, 513)
    cache.grow(table, 33)
    cache.commit(table, token_ids, 33)
    cache.close(table)
    assert compute(cache, token_ids) == 32


def test_a_block_is_recomputed_not_lost_when_two_requests_made_it() -> None:
    cache = KvCacheManager(8, BLOCK)
    token_ids = list(range(33))
    first, second = start(cache, token_ids), start(cache, token_ids)
    assert first is not None
    assert second is not None
    cache.commit(first, token_ids, 33)
    cache.commit(second, token_ids, 33)
    cache.close(first)
    cache.close(second)
    cache.check_integrity()
    assert compute(cache, token_ids) == 32


def test_resetting_forgets_what_nobody_uses() -> None:
    cache = KvCacheManager(8, BLOCK)
    compute(cache, list(range(33)))
    other = list(range(100, 133))
    table = start(cache, other)
    assert table is not None
    cache.commit(table, other, 33)
    cache.reset_prefix_cache()
    cache.check_integrity()
    assert compute(cache, list(range(33))) == 0
    assert compute(cache, other) == 32
    cache.close(table)
    cache.check_integrity()


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    cache = KvCacheManager(8, BLOCK, enable_prefix_caching=False)
    assert compute(cache, list(range(33))) == 0
    assert compute(cache, list(range(33))) == 0


def test_closing_twice_is_an_error() -> None:
    cache = KvCacheManager(4, BLOCK)
    table = start(cache, [1])
    assert table is not None
    cache.close(table)
    with pytest.raises(KeyError):
        cache.close(table)
    cache.check_integrity()
