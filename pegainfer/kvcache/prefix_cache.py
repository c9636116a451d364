"""Which block holds which prefix. Full blocks only, found by a hash that covers all tokens before them.

The hash of a block is SHA-256 over the hash of the block before it and its own token ids; the chain starts
from the salt, so requests with different salts never share. SHA-256 because a collision would show one
tenant the content of another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

__all__ = ["CacheGroup", "HashChain", "PrefixCache", "agreed_hit"]


class HashChain:
    """The block hashes of one growing sequence of tokens."""

    __slots__ = ("_block_size", "_root", "digests")

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        self._root = bytes(32) if salt is None else _salted_root(salt)
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_blocks: int) -> None:
        """Hash the leading `num_blocks` blocks of `token_ids`, those already hashed excepted."""
        digests, size = self.digests, self._block_size
        first = len(digests)
        if num_blocks <= first:
            return
        content = array("q", token_ids[first * size : num_blocks * size]).tobytes()
        parent = digests[-1] if digests else self._root
        stride = len(content) // (num_blocks - first)
        for start in range(0, len(content), stride):
            parent = hashlib.sha256(parent + content[start : start + stride]).digest()
            digests.append(parent)


def _salted_root(salt: str) -> bytes:
    # Hashed twice: no block's input is 32 bytes long, so no salt can pose as the hash of a block.
    inner = hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
    return hashlib.sha256(inner).digest()


class CacheGroup(Protocol):
    """Layers whose cached state is found together. Full attention needs every block of a prefix; a sliding
    window needs the last few, recurrent layers one snapshot at the end.
    """

    def longest_hit(self, digests: Sequence[bytes], limit: int) -> int:
        """The largest number of leading blocks, at most `limit`, after which this group can go on."""
        ...


def agreed_hit(groups: Sequence[CacheGroup], digests: Sequence[bytes], limit: int) -> int:
    """The largest number of leading blocks after which every group can go on.

    A group's answer may fall below another's, so all are asked again until none objects.
    """
    agreed = limit
    while True:
        shortest = min(group.longest_hit(digests, agreed) for group in groups)
        if shortest == agreed:
            return agreed
        agreed = shortest


class PrefixCache:
    """Blocks of full attention by the hash of their prefix."""

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block_id: int) -> bool:
        """Whether the block can be found by its hash."""
        return block_id in self._digests

    def __getitem__(self, digest: bytes) -> int:
        return self._blocks[digest]

    def longest_hit(self, digests: Sequence[bytes], limit: int) -> int:
        """See `CacheGroup`: the length of the unbroken run of known blocks."""
        blocks = self._blocks
        for index in range(limit):
            if digests[index] not in blocks:
                return index
        return limit

    def register(self, block_id: int, digest: bytes) -> None:
        """Make a computed block findable. Of two blocks with the same content the first one stays."""
        if digest not in self._blocks:
            self._blocks[digest] = block_id
            self._digests[block_id] = digest

    def forget(self, block_id: int) -> None:
        """The block is about to lose its content."""
        del self._blocks[self._digests.pop(block_id)]
