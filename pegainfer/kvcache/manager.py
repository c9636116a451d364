"""Which KV blocks a request holds, from its first step to its last. Decides; touches no memory.

The block table is the one place that knows how many tokens were found in the cache: it is made together with
the decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from pegainfer.kvcache.block_pool import BlockPool
from pegainfer.kvcache.prefix_cache import CacheGroup, HashChain, PrefixCache, agreed_hit

__all__ = ["BlockTable", "KvCacheManager"]


class BlockTable:
    """The blocks of one request, in the order of its tokens; the manager alone changes it."""

    __slots__ = ("block_ids", "chain", "num_cached_tokens", "num_registered", "num_slots")

    def __init__(self, block_ids: list[int], chain: HashChain, *, num_hits: int, block_size: int) -> None:
        self.block_ids = block_ids
        self.chain = chain
        self.num_cached_tokens = num_hits * block_size
        self.num_registered = num_hits
        """Leading blocks that were offered to the prefix cache."""
        self.num_slots = len(block_ids) * block_size
        """Tokens that the blocks can hold."""


class KvCacheManager:
    """All KV blocks of a worker: `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._prefix_cache = PrefixCache()
        self._groups: tuple[CacheGroup, ...] = (self._prefix_cache,)
        self._pool = BlockPool(num_blocks, self._prefix_cache.forget)
        self._tables: set[BlockTable] = set()

    @property
    def num_blocks(self) -> int:
        """Blocks that exist."""
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones and cached ones without a user."""
        return self._pool.num_available

    @property
    def num_used(self) -> int:
        """Blocks that block tables hold."""
        return self._pool.num_used

    @property
    def capacity(self) -> int:
        """Tokens that all blocks can hold."""
        return self._pool.num_blocks * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that block tables hold, 0..1."""
        return self._pool.num_used / self._pool.num_blocks

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def make_chain(self, salt: str | None) -> HashChain:
        """The hashes of a new request's blocks; they outlive its block tables."""
        return HashChain(self.block_size, salt)

    def find(self, chain: HashChain, token_ids: Sequence[int]) -> int:
        """How many leading tokens of `token_ids` are cached: full blocks, never the last token, whose
        logits are still to be computed.
        """
        if not self.enable_prefix_caching:
            return 0
        limit = (len(token_ids) - 1) // self.block_size
        chain.extend(token_ids, limit)
        return agreed_hit(self._groups, chain.digests, limit) * self.block_size

    def open(
        self, chain: HashChain, num_tokens: int, *, num_cached_tokens: int, reserve: int = 0
    ) -> BlockTable | None:
        """A block table for `num_tokens` tokens that starts with what `find` has just found.

        None when that would leave fewer than `reserve` blocks available.
        """
        num_hits = num_cached_tokens // self.block_size
        hits = [self._prefix_cache[digest] for digest in chain.digests[:num_hits]]
        num_new = self.blocks_of(num_tokens) - num_hits
        pool = self._pool
        num_taken = num_new + sum(block_id in pool.cached for block_id in hits)
        if num_taken + reserve > pool.num_available:
            return None
        for block_id in hits:
            pool.share(block_id)
        table = BlockTable(
            hits + pool.allocate(num_new), chain, num_hits=num_hits, block_size=self.block_size
        )
        self._tables.add(table)
        return table

    def grow(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Append blocks until `num_tokens` tokens fit and return the new ones; None when too few exist."""
        count = self.blocks_of(num_tokens) - len(table.block_ids)
        if count <= 0:
            return []
        if count > self._pool.num_available:
            return None
        added = self._pool.allocate(count)
        table.block_ids += added
        table.num_slots += count * self.block_size
        return added

    def commit(self, table: BlockTable, token_ids: Sequence[int], num_computed_tokens: int) -> None:
        """The leading `num_computed_tokens` tokens are in memory: cache the blocks that they fill."""
        num_full = num_computed_tokens // self.block_size
        if num_full <= table.num_registered or not self.enable_prefix_caching:
            return
        table.chain.extend(token_ids, num_full)
        for index in range(table.num_registered, num_full):
            self._prefix_cache.register(table.block_ids[index], table.chain.digests[index])
        table.num_registered = num_full

    def close(self, table: BlockTable) -> None:
        """Give all blocks back; raises `KeyError` when the table is not open.

        The last block goes first, so that the ends of prefixes are evicted before their beginnings.
        """
        self._tables.remove(table)
        for block_id in reversed(table.block_ids):
            self._pool.release(block_id, keep=block_id in self._prefix_cache)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request uses."""
        self._pool.evict_all()

    def check_integrity(self) -> None:
        """Check that every block is free, cached or used and counted right; raises `RuntimeError`."""
        self._pool.check_integrity(table.block_ids for table in self._tables)
        pool = self._pool
        if pool.num_used + pool.num_available != pool.num_blocks:
            raise RuntimeError("free, cached and used blocks do not add up to all blocks")
        if any(block_id not in self._prefix_cache for block_id in pool.cached):
            raise RuntimeError("a cached block cannot be found by any hash")
