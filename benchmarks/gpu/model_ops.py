"""The ops that the engine binds for a model, with random weights of its shapes: what there is to time."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stopwatch import Stopwatch

from pegainfer.config import EngineConfig
from pegainfer.errors import UnsupportedModelError
from pegainfer.kernels.artifacts import PlannedGpu, prefetch
from pegainfer.ops.activation import SiluAndMulFacts
from pegainfer.ops.attention import AttentionFacts
from pegainfer.ops.embedding import EmbeddingFacts
from pegainfer.ops.gather import GatherRowsFacts
from pegainfer.ops.linear import LinearFacts, linear
from pegainfer.ops.norm import RmsNormFacts
from pegainfer.ops.norm_linear import NormLinearFacts, norm_linear
from pegainfer.ops.op import bind, record_bindings
from pegainfer.ops.rope import QkvRopeFacts
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from pegainfer.weights.dummy import DummyCheckpoint
from pegainfer.worker.build import bind_ops

__all__ = ["Matrix", "Model"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of every layer (or the head), with the launchers that the engine has for it."""

    facts: LinearFacts
    fused_facts: NormLinearFacts | None
    product: Any
    fused: Any
    weights: list[Tensor]
    bias: Tensor | None

    def is_fused(self, rows: int) -> bool:
        """Whether norm and gate are part of the launch."""
        return self.fused is not None and self.fused.serves(rows)

    def columns(self, rows: int) -> int:
        """Width of the output."""
        if self.fused_facts is not None and self.is_fused(rows):
            return self.fused_facts.out_features
        return self.facts.out_features

    def cost(self, rows: int) -> tuple[int, int]:
        """Bytes and FLOP."""
        facts = self.facts
        written = rows * self.columns(rows) * facts.out_dtype.itemsize * (2 if facts.accumulate else 1)
        nbytes = self.weights[0].nbytes + rows * facts.in_features * facts.act.itemsize + written
        return nbytes, 2 * rows * facts.in_features * facts.out_features


@dataclass(frozen=True, slots=True)
class Model:
    """The facts of a model's ops, as the engine binds them, and its matrices, made when first asked for."""

    watch: Stopwatch
    vocab_size: int
    num_layers: int
    norm: RmsNormFacts
    gate: SiluAndMulFacts
    rope: QkvRopeFacts
    attention: AttentionFacts
    embedding: EmbeddingFacts
    gather: GatherRowsFacts
    matrix_facts: dict[str, LinearFacts]
    fused_facts: dict[LinearFacts, NormLinearFacts]
    matrices: dict[str, Matrix] = field(default_factory=dict)

    @classmethod
    def read(cls, config: Path, watch: Stopwatch, *, block_size: int | None = None) -> Model:
        """Bind the model on a planned GPU and look at what was bound. Compiles its kernels, all at once.
        `block_size`: tokens per KV block, if not the usual number.

        Raises `ConfigError` and `UnsupportedModelError`.
        """
        planned = PlannedGpu(watch.gpu.arch)
        checkpoint = DummyCheckpoint(config, json.loads(config.read_text()), {}, seed=0)
        with record_bindings() as found:
            model = bind_ops(
                EngineConfig.from_flat(load_format="dummy", block_size=block_size), checkpoint, device=planned
            )
        if not watch.planned:
            prefetch(planned.sources, planned.arch)
        one: dict[str, Any] = {binding.op: binding.facts for binding in found}
        if not {"silu_and_mul", "linear"} <= one.keys() or any("moe" in name for name in one):
            raise UnsupportedModelError(f"{config}: only models without experts are measured")
        attention, gate = one["paged_attention"], one["silu_and_mul"]

        def name(facts: LinearFacts) -> str:
            if facts.accumulate:
                return "o" if facts.in_features == attention.num_heads * attention.head_dim else "down"
            if facts.out_features == model.vocab_size:
                return "lm_head"
            return "gate_up" if facts.out_features == 2 * gate.size else "qkv"

        return cls(
            watch=watch,
            vocab_size=model.vocab_size,
            num_layers=len(model.kv_specs),
            norm=one["rms_norm"],
            gate=gate,
            rope=one["qkv_rope_write"],
            attention=attention,
            embedding=one["embedding"],
            gather=one["gather_rows"],
            matrix_facts={name(binding.facts): binding.facts for binding in found if binding.op == "linear"},
            fused_facts={
                binding.facts.linear: binding.facts for binding in found if binding.op == "norm_linear"
            },
        )

    def matrix(self, name: str) -> Matrix:
        """`qkv`, `o`, `gate_up`, `down` or `lm_head`, with random weights: one a layer, and more where these
        would fit in the L2 cache.
        """
        made = self.matrices.get(name)
        if made is None:
            watch, facts = self.watch, self.matrix_facts[name]
            product: Any = bind(linear, facts, watch.gpu)
            fused_facts = self.fused_facts.get(facts)
            size = product.packed_bytes()
            count = max(watch.copies(size), 1 if name == "lm_head" else self.num_layers)
            made = self.matrices[name] = Matrix(
                facts=facts,
                fused_facts=fused_facts,
                product=product,
                fused=None if fused_facts is None else bind(norm_linear, fused_facts, watch.gpu),
                weights=[watch.random_bytes(size, facts.act) for _ in range(count)],
                bias=watch.random((facts.out_features,), DType.float32) if facts.has_bias else None,
            )
        return made

    def vector(self) -> Tensor:
        """The weight of a norm."""
        return self.watch.random((self.norm.size,), DType.float32)
