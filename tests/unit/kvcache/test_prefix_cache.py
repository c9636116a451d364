"""Hashes of blocks and the search for them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pegainfer.kvcache.prefix_cache import HashChain, PrefixCache, agreed_hit


def digests(token_ids: list[int], *, salt: str | None = None, block_size: int = 4) -> list[bytes]:
    chain = HashChain(block_size, salt)
    chain.extend(token_ids, len(token_ids) // block_size)
    return chain.digests


def test_a_hash_covers_all_tokens_before_it() -> None:
    one = digests([1, 2, 3, 4, 5, 6, 7, 8])
    other = digests([1, 2, 3, 9, 5, 6, 7, 8])
    assert one[0] != other[0]
    assert one[1] != other[1]
    assert digests([5, 6, 7, 8])[0] != one[1]


def test_only_full_blocks_are_hashed() -> None:
    assert len(digests([1, 2, 3, 4, 5, 6, 7])) == 1
    assert digests([1, 2, 3, 4, 5, 6, 7]) == digests([1, 2, 3, 4, 9])


def test_order_and_split_of_tokens_matter() -> None:
    assert digests([1, 2, 3, 4]) != digests([4, 3, 2, 1])
    assert digests([1, 23, 3, 4]) != digests([12, 3, 3, 4])


def test_growing_gives_the_same_hashes_as_hashing_at_once() -> None:
    token_ids = list(range(100, 148))
    chain = HashChain(4, "salt")
    for count in (0, 1, 1, 5, 3, 12):
        chain.extend(token_ids, count)
    assert chain.digests == digests(token_ids, salt="salt")


def test_salts_separate() -> None:
    token_ids = [1, 2, 3, 4]
    roots = {digests(token_ids, salt=salt)[0] for salt in (None, "", "a", "b", "\ud800")}
    assert len(roots) == 5


def test_a_salt_cannot_pose_as_a_block() -> None:
    """With a salt that spells another chain's first block, the second block's hash must not come out."""
    chain = digests([1, 2, 3, 4, 5, 6, 7, 8])
    content = b"".join(token.to_bytes(8, "little") for token in (1, 2, 3, 4))
    for salt in (content.decode(), (bytes(32) + content).decode()):
        assert digests([5, 6, 7, 8], salt=salt)[0] not in chain


def test_the_longest_unbroken_run_is_found() -> None:
    cache = PrefixCache()
    chain = digests(list(range(16)))
    for block_id in (0, 1, 3):
        cache.register(block_id, chain[block_id])
    assert cache.longest_hit(chain, 4) == 2
    assert cache.longest_hit(chain, 1) == 1
    assert cache[chain[1]] == 1


def test_of_two_equal_blocks_the_first_stays() -> None:
    cache = PrefixCache()
    (digest,) = digests([1, 2, 3, 4])
    cache.register(5, digest)
    cache.register(6, digest)
    assert cache[digest] == 5
    assert 6 not in cache
    cache.forget(5)
    assert len(cache) == 0
    with pytest.raises(KeyError):
        cache[digest]


class EverySecond:
    """A group that can only go on after an even number of blocks, as from snapshots."""

    def longest_hit(self, digests: Sequence[bytes], limit: int) -> int:
        return limit - limit % 2


class LastOf:
    """A group that needs only the last block of a prefix, as a window of one block does."""

    def __init__(self, known: set[int]) -> None:
        self.known = known

    def longest_hit(self, digests: Sequence[bytes], limit: int) -> int:
        return next((count for count in range(limit, 0, -1) if count - 1 in self.known), 0)


def test_a_hit_is_what_all_groups_agree_on() -> None:
    full = PrefixCache()
    chain = digests(list(range(32)))
    for block_id in range(7):
        full.register(block_id, chain[block_id])
    assert agreed_hit([full], chain, 8) == 7
    assert agreed_hit([full, EverySecond()], chain, 8) == 6
    # 6 suits the snapshots, the window offers 5, the snapshots fall back to 4, the window to 2.
    assert agreed_hit([full, EverySecond(), LastOf({1, 4})], chain, 8) == 2
    assert agreed_hit([full, LastOf(set())], chain, 8) == 0
