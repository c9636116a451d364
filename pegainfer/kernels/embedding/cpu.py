"""Embedding lookup on the CPU, from a checkpoint's rows or from the packed weight of a tied head."""

from __future__ import annotations

from pegainfer.kernels.linear.cpu import NATIVE_FORMATS
from pegainfer.kernels.native import native_kernel
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@embedding.provider("native", DeviceKind.cpu)
def _bind(facts: EmbeddingFacts, device: Device) -> Launcher | None:
    if facts.act is not DType.float32 or facts.format not in NATIVE_FORMATS:
        return None
    kernel = native_kernel(device, f"pega_embedding_{facts.format}")
    if kernel is None:
        return None
    width, tied, rows = facts.hidden_size, int(facts.tied), facts.vocab_size

    def launch(*, token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
        kernel(
            token_ids.data_ptr,
            token_ids.shape[0],
            weight.data_ptr,
            width,
            tied,
            rows,
            out.data_ptr,
            out.strides[0],
        )

    return launch
