"""Ownership of KV blocks: how many users each has, which are free, and which unused ones still hold content.

Knows nothing of tokens or hashes. A block is in exactly one of three states: free (no content), cached
(content, no user) or used (one user or more).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 0 to `num_blocks - 1`. `on_evict` is told when a cached block is about to lose its content."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack, the lowest id on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> KeysView[int]:
        """Blocks without a user that hold content, the next to be evicted first."""
        return self._cached.keys()

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Blocks for one new user; the least recently used cached ones are evicted when none is free.

        Raises `RuntimeError` when fewer than `count` are available.
        """
        if count > self.num_available:
            raise RuntimeError(f"{count} blocks were requested, {self.num_available} are available")
        taken: list[int] = []
        for _ in range(count):
            if self._free:
                block_id = self._free.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                self._on_evict(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_id: int) -> None:
        """Add a user to a block that holds content."""
        if not self._ref_counts[block_id]:
            del self._cached[block_id]
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep: bool) -> None:
        """Remove one user. The last one leaves the block cached if it is worth to `keep`, else free.

        Raises `RuntimeError` when the block has no user.
        """
        count = self._ref_counts[block_id] - 1
        if count < 0:
            raise RuntimeError(f"block {block_id} was released without a user")
        self._ref_counts[block_id] = count
        if count == 0:
            if keep:
                self._cached[block_id] = None
            else:
                self._free.append(block_id)

    def evict_all(self) -> None:
        """Make every cached block free."""
        for block_id in self._cached:
            self._on_evict(block_id)
            self._free.append(block_id)
        self._cached.clear()

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Compare with the block tables of all users; raises `RuntimeError` at the first contradiction."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block_id in table:
                expected[block_id] += 1
        for block_id, (actual, users) in enumerate(zip(self._ref_counts, expected, strict=True)):
            if actual != users:
                raise RuntimeError(
                    f"block {block_id} counts {actual} users, block tables hold it {users} times"
                )
        unused = [*self._free, *self._cached]
        if len(set(unused)) != len(unused):
            raise RuntimeError("a block is listed twice as unused")
        if sorted(unused) != [block_id for block_id, users in enumerate(expected) if not users]:
            raise RuntimeError("free and cached blocks are not exactly those without a user")
