"""Embedding lookup on the CPU, from a checkpoint's rows or from the packed weight of a tied head."""

from __future__ import annotations

from collections.abc import Callable

from pegainfer.kernels.linear.cpu import NATIVE_FORMATS
from pegainfer.kernels.native import native_kernel
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import Launcher
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


class _NativeEmbedding:
    """The launcher of `embedding`. A table of its own stays as the checkpoint stores it."""

    def __init__(self, facts: EmbeddingFacts, device: Device, kernel: Callable[..., None]) -> None:
        self._facts = facts
        self._device = device
        self._kernel = kernel
        self._sizes = (facts.hidden_size, int(facts.tied), facts.vocab_size)

    def packed_bytes(self) -> int:
        """Bytes of the rows."""
        return self._facts.vocab_size * self._facts.format.row_bytes(self._facts.hidden_size)

    def pack(self, raw: RawWeight) -> Tensor:
        """The rows, copied; raises `WeightsError` for another shape or format."""
        raw.require(self._facts.format, (self._facts.vocab_size, self._facts.hidden_size))
        return self._device.from_numpy(raw.data.reshape(-1).copy())

    def __call__(self, *, token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
        """Enqueue the lookup."""
        self._kernel(
            token_ids.data_ptr,
            token_ids.shape[0],
            weight.data_ptr,
            *self._sizes,
            out.data_ptr,
            out.strides[0],
        )


@embedding.provider("native", DeviceKind.cpu)
def _bind(facts: EmbeddingFacts, device: Device) -> Launcher | None:
    if facts.act is not DType.float32 or facts.format not in NATIVE_FORMATS:
        return None
    kernel = native_kernel(device, f"pega_embedding_{facts.format}")
    if kernel is None:
        return None
    return _NativeEmbedding(facts, device, kernel)
