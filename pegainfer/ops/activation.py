"""SwiGLU: `out = silu(gate) * up`, where each row of the input holds the gate and then the up projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.runtime.dtypes import DType

__all__ = ["SiluAndMulFacts", "silu", "silu_and_mul"]


@dataclass(frozen=True, slots=True)
class SiluAndMulFacts:
    """`size` is the width of the output; the input is twice as wide."""

    size: int
    act: DType


def silu(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`x / (1 + exp(-x))`, without overflow for large negative `x`."""
    e = np.exp(-np.abs(x))
    result: np.ndarray[Any, Any] = x * np.where(x >= 0, 1, e) / (1 + e)
    return result


def _reference(facts: SiluAndMulFacts, *, gate_up: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
    values = gate_up.astype(np.float32)
    out[...] = silu(values[:, : facts.size]) * values[:, facts.size :]


def _cases(rng: np.random.Generator) -> Iterator[Case[SiluAndMulFacts]]:
    for act in (DType.float32, DType.bfloat16):
        for rows, size in ((1, 1536), (7, 64), (3, 50), (2, 3072)):
            gate_up = rng.normal(0, 4, (rows, 2 * size)).astype(act.numpy)
            gate_up[0, :4] = (-200, -88, 88, 200)  # where exp leaves the range of float32
            yield Case(
                name=f"{act}-{rows}x{size}",
                facts=SiluAndMulFacts(size=size, act=act),
                arguments={"gate_up": gate_up, "out": np.zeros((rows, size), act.numpy)},
                outputs=("out",),
            )


def _tolerance(facts: SiluAndMulFacts) -> float:
    return 1e-6 if facts.act is DType.float32 else 4e-3


silu_and_mul: Op[SiluAndMulFacts] = Op("silu_and_mul", _reference, _cases, _tolerance)
