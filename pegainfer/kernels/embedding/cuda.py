"""Embedding lookup on a GPU: rows of a table in the activation type, which a tied head shares."""

from __future__ import annotations

from pegainfer.kernels.gather.cuda import row_gatherer
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []

_STORED = {
    WeightFormat.f32: DType.float32,
    WeightFormat.bf16: DType.bfloat16,
    WeightFormat.f16: DType.float16,
}


@embedding.provider("cuda", DeviceKind.cuda)
def _bind(facts: EmbeddingFacts, device: Device) -> Launcher | None:
    if facts.format is WeightFormat.fp8:
        return None  # numbers and scales are no rows of the activation type
    if not facts.tied and _STORED.get(facts.format) is not facts.act:
        return None  # a table of its own lies as the checkpoint stores it
    gather = row_gatherer(device, size=facts.hidden_size, act=facts.act)

    def launch(*, token_ids: Tensor, weight: Tensor, out: Tensor) -> None:
        gather(weight.data_ptr, facts.hidden_size, facts.vocab_size, token_ids, out)

    return launch
