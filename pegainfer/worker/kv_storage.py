"""The memory of the KV cache: blocks that hold all layers, one after the other."""

from __future__ import annotations

from pegainfer.kvcache.spec import KvCacheSpec
from pegainfer.models.base import LayerKv
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["KvStorage"]


class KvStorage:
    """Up to `max_blocks` blocks laid out by `spec`. Those that were committed exist, uninitialised."""

    def __init__(self, device: Device, spec: KvCacheSpec, *, max_blocks: int) -> None:
        self.spec = spec
        stride = spec.block_bytes
        self._reserved = device.reserve(max_blocks * stride)
        memory = Tensor(self._reserved, DType.uint8, (max_blocks * stride,))
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

    def commit(self, num_blocks: int) -> None:
        """Let the first `num_blocks` exist; raises `CapacityError` when there is no memory for them."""
        self._reserved.commit(num_blocks * self.spec.block_bytes)
