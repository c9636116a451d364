"""Embedding lookup on a GPU: rows of a table in the activation type, which a tied head shares.

A table of its own that is stored in another type is expanded when it is packed, as matrices are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import cuda_device
from pegainfer.kernels.gather.cuda import row_gatherer
from pegainfer.kernels.linear.cuda import device_rows
from pegainfer.kernels.linear.fp8 import Fp8Linear
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import Launcher
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__: list[str] = []


class _CudaEmbedding:
    """The launcher of the op `embedding`."""

    def __init__(self, facts: EmbeddingFacts, gpu: CudaDevice) -> None:
        self._facts = facts
        self._gpu = gpu
        self._gather = row_gatherer(gpu, size=facts.hidden_size, act=facts.act)

    def packed_bytes(self) -> int:
        """Bytes of a table of its own."""
        return self._facts.vocab_size * self._facts.hidden_size * self._facts.act.itemsize

    def pack(self, raw: RawWeight) -> Tensor:
        """The rows in device memory; raises `WeightsError` when they are not those that the facts name."""
        raw.require(self._facts.format, (self._facts.vocab_size, self._facts.hidden_size))
        return device_rows(self._gpu, [raw], self._facts.act)

    def __call__(self, *, token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
        """Enqueue the lookup."""
        facts = self._facts
        self._gather(weight.data_ptr, facts.hidden_size, facts.vocab_size, token_ids, out)


@embedding.provider("cuda", DeviceKind.cuda)
def _bind(facts: EmbeddingFacts, device: Device) -> Launcher | None:
    if facts.tied and Fp8Linear.serves(facts.head):
        return None  # numbers and scales are no rows of the activation type
    return _CudaEmbedding(facts, cuda_device(device))
