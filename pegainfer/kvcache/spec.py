"""What a layer keeps per token: the specs from which the KV cache is laid out. Sizes only, no memory.

A block is page-first: the bytes of one block hold all layers, so moving a block elsewhere is one copy. How a
layer's own part is laid out inside is the business of the device's attention kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.runtime.dtypes import DType

__all__ = ["FullAttention", "KvCacheSpec"]


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Keys and values of every position: `num_kv_heads * head_dim` each."""

    num_kv_heads: int
    head_dim: int
    dtype: DType

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token of one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The specs of a model's layers, in order, that share one block table."""

    layers: tuple[FullAttention, ...]
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_size * sum(layer.bytes_per_token for layer in self.layers)

    def layer_offset(self, layer: int) -> int:
        """Byte offset of a layer's part inside a block: its keys, followed by its values."""
        return self.block_size * sum(spec.bytes_per_token for spec in self.layers[:layer])
