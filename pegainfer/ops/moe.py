"""Mixture of experts: which experts a token goes to, and the sum of what they say.

A row of the result never depends on the other rows of the call: experts work on their rows one by one, and
the sum runs over the slots `0 .. top_k - 1` of a row in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pegainfer.ops.activation import silu
from pegainfer.ops.linear import LinearFacts, linear, random_weight
from pegainfer.ops.op import Case, Op
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = [
    "ExpertWeights",
    "MoeExpertsFacts",
    "MoeRouterFacts",
    "experts_case",
    "moe_experts",
    "moe_router",
]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class MoeRouterFacts:
    """`renormalize` divides the chosen weights by their sum."""

    num_experts: int
    top_k: int
    renormalize: bool
    act: DType


@dataclass(frozen=True, slots=True)
class MoeExpertsFacts:
    """`format` is that of every expert's weights: gate over up `[2 * intermediate_size, hidden_size]`, and
    down `[hidden_size, intermediate_size]`.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    format: WeightFormat
    act: DType


def _route(facts: MoeRouterFacts, *, logits: Array, topk_ids: Array, topk_weights: Array) -> None:
    """Softmax over all experts; the `top_k` largest, best first, equal ones by the lower id."""
    values = logits.astype(np.float32)
    ids = np.argsort(-values, axis=1, kind="stable")[:, : facts.top_k]
    weights = np.exp(values - values.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    chosen = np.take_along_axis(weights, ids, axis=1)
    if facts.renormalize:
        chosen /= chosen.sum(axis=1, keepdims=True)
    topk_ids[...] = ids
    topk_weights[...] = chosen


def _experts(
    facts: MoeExpertsFacts,
    *,
    x: Array,  # [T, hidden_size]
    gate_up: Array,  # uint8, the experts' rows one after the other
    down: Array,  # uint8
    topk_ids: Array,  # int32 [T, top_k]
    topk_weights: Array,  # float32 [T, top_k]
    out: Array,  # [T, hidden_size], added to
) -> None:
    hidden, intermediate = facts.hidden_size, facts.intermediate_size
    into = LinearFacts(hidden, 2 * intermediate, facts.format, DType.float32)
    back = LinearFacts(intermediate, hidden, facts.format, DType.float32)
    gate_up, down = gate_up.reshape(facts.num_experts, -1), down.reshape(facts.num_experts, -1)
    said = np.zeros((*topk_ids.shape, hidden), np.float32)
    for expert in np.unique(topk_ids):
        rows, slots = np.nonzero(topk_ids == expert)
        both = np.zeros((len(rows), 2 * intermediate), np.float32)
        linear.reference(into, x=x[rows].astype(np.float32), weight=gate_up[expert], bias=None, out=both)
        activated = silu(both[:, :intermediate]) * both[:, intermediate:]
        result = np.zeros((len(rows), hidden), np.float32)
        linear.reference(back, x=activated, weight=down[expert], bias=None, out=result)
        said[rows, slots] = result
    total = out.astype(np.float32)
    for slot in range(facts.top_k):
        total += topk_weights[:, slot, None] * said[:, slot]
    out[...] = total


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One of the two packed weights of a case: a `CaseInput` made of what all experts' checkpoints hold."""

    part: Literal["gate_up", "down"]
    gate_up: tuple[RawWeight, ...]
    down: tuple[RawWeight, ...]

    def for_reference(self, facts: MoeExpertsFacts) -> Array:
        """The experts' bytes, row-major."""
        raws = self.gate_up if self.part == "gate_up" else self.down
        return np.concatenate([raw.rows().reshape(-1) for raw in raws])

    def for_device(self, facts: MoeExpertsFacts, device: Device, *, provider: str, launcher: Any) -> Tensor:
        """The experts packed one by one by the launcher."""
        gate_up = device.zeros((launcher.gate_up_bytes(),), DType.uint8)
        down = device.zeros((launcher.down_bytes(),), DType.uint8)
        for expert, (first, second) in enumerate(zip(self.gate_up, self.down, strict=True)):
            launcher.pack_expert(expert, first, second, gate_up, down)
        return gate_up if self.part == "gate_up" else down


def _router_cases(rng: np.random.Generator) -> Iterator[Case[MoeRouterFacts]]:
    for act in (DType.float32, DType.bfloat16):
        for rows, num_experts, top_k, renormalize in (
            (1, 128, 8, True),
            (33, 8, 2, False),
            (5, 60, 4, True),
            (4, 3, 3, False),
        ):
            logits = rng.normal(0, 2, (rows, num_experts))
            logits[0] = np.round(logits[0])  # ties
            yield Case(
                name=f"{act}-{rows}x{num_experts}-{top_k}{'-renormalized' if renormalize else ''}",
                facts=MoeRouterFacts(num_experts, top_k, renormalize, act),
                arguments={
                    "logits": logits.astype(act.numpy),
                    "topk_ids": np.zeros((rows, top_k), np.int32),
                    "topk_weights": np.zeros((rows, top_k), np.float32),
                },
                outputs=("topk_ids", "topk_weights"),
            )


def _experts_cases(rng: np.random.Generator) -> Iterator[Case[MoeExpertsFacts]]:
    for act in (DType.float32, DType.bfloat16):
        for format in WeightFormat:
            for rows, num_experts, top_k, hidden, intermediate in (
                (1, 8, 2, 64, 96),
                (37, 4, 2, 96, 64),
                (9, 16, 4, 128, 32),
            ):
                facts = MoeExpertsFacts(num_experts, top_k, hidden, intermediate, format, act)
                yield experts_case(rng, facts, rows)
        yield experts_case(rng, MoeExpertsFacts(4, 2, 256, 128, WeightFormat.fp8, act), 9)


def experts_case(rng: np.random.Generator, facts: MoeExpertsFacts, rows: int) -> Case[MoeExpertsFacts]:
    """A case of `rows` tokens, none of whom goes to the last expert."""
    num_experts, top_k = facts.num_experts, facts.top_k
    hidden, intermediate, format = facts.hidden_size, facts.intermediate_size, facts.format
    gate_up = [random_weight(rng, format, 2 * intermediate, hidden) for _ in range(num_experts)]
    down = [random_weight(rng, format, hidden, intermediate) for _ in range(num_experts)]
    ids = np.argsort(rng.random((rows, num_experts)), axis=1)[:, :top_k].astype(np.int32)
    ids[ids == num_experts - 1] = 0  # some go twice to the first one instead
    return Case(
        name=f"{facts.act}-{format}-{rows}x{hidden}-{top_k}of{num_experts}x{intermediate}",
        facts=facts,
        arguments={
            "x": rng.normal(0, 1, (rows, hidden)).astype(facts.act.numpy),
            "gate_up": ExpertWeights("gate_up", tuple(gate_up), tuple(down)),
            "down": ExpertWeights("down", tuple(gate_up), tuple(down)),
            "topk_ids": ids,
            "topk_weights": rng.random((rows, top_k)).astype(np.float32),
            "out": rng.normal(0, 1, (rows, hidden)).astype(facts.act.numpy),
        },
        outputs=("out",),
    )


def _router_tolerance(facts: MoeRouterFacts) -> float:
    return 1e-6


def _experts_tolerance(facts: MoeExpertsFacts) -> float:
    """A rounding of the activations in between can fall to the other side. A device with 16-bit activations
    expands quantised weights to their type, and rounds a result once.
    """
    if facts.act is not DType.float32:
        return 2e-2 if facts.format.is_quantized else 5e-3
    if facts.format in (WeightFormat.f32, WeightFormat.f16, WeightFormat.fp8):
        return 1e-5
    return 5e-3 if facts.format.is_quantized else 2e-3


moe_router: Op[MoeRouterFacts] = Op("moe_router", _route, _router_cases, _router_tolerance)
moe_experts: Op[MoeExpertsFacts] = Op("moe_experts", _experts, _experts_cases, _experts_tolerance)
