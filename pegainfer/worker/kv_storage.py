"""The memory of the KV cache: blocks that hold all layers, one after the other."""

from __future__ import annotations

from pegainfer.kvcache.spec import KvCacheSpec
from pegainfer.models.base import LayerKv
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType

__all__ = ["KvStorage"]


class KvStorage:
    """`num_blocks` blocks laid out by `spec`. Uninitialised: pages are taken when they are first written."""

    def __init__(self, device: Device, spec: KvCacheSpec, *, num_blocks: int) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        stride = spec.block_bytes
        memory = device.empty((num_blocks * stride,), DType.uint8)
        self.layers = tuple(
            LayerKv(
                memory=memory.slice(0, spec.layer_offset(index), memory.numel),
                block_stride=stride,
                block_size=spec.block_size,
                spec=layer,
            )
            for index, layer in enumerate(spec.layers)
        )

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.spec.block_size

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.spec.block_bytes
