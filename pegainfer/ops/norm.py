"""RMSNorm over the last dimension: `y = x * rsqrt(mean(x^2) + eps) * weight`, computed in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.runtime.dtypes import DType

__all__ = ["RmsNormFacts", "rms_norm"]


@dataclass(frozen=True, slots=True)
class RmsNormFacts:
    """`size` is the width of a row; `act` the element type of `x` and `out`; the weight is float32."""

    size: int
    eps: float
    act: DType


def _reference(
    facts: RmsNormFacts, *, x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], out: np.ndarray[Any, Any]
) -> None:
    values = x.astype(np.float32)
    mean_square = np.mean(np.square(values, dtype=np.float64), axis=-1, keepdims=True)
    out[...] = values / np.sqrt(mean_square + facts.eps).astype(np.float32) * weight


def _cases(rng: np.random.Generator) -> Iterator[Case[RmsNormFacts]]:
    shapes = ((1, 576, 1e-5), (3, 64, 1e-6), (33, 1024, 1e-6), (2, 50, 1e-5), (5, 4096, 1e-6))
    for act in (DType.float32, DType.bfloat16):
        for rows, size, eps in shapes:
            x = rng.normal(0, 3, (rows, size)).astype(act.numpy)
            x[0] = 0  # eps alone keeps this row finite
            yield Case(
                name=f"{act}-{rows}x{size}",
                facts=RmsNormFacts(size=size, eps=eps, act=act),
                arguments={
                    "x": x,
                    "weight": rng.normal(1, 0.3, size).astype(np.float32),
                    "out": np.zeros((rows, size), act.numpy),
                },
                outputs=("out",),
            )


def _tolerance(facts: RmsNormFacts) -> float:
    return 1e-6 if facts.act is DType.float32 else 4e-3


rms_norm: Op[RmsNormFacts] = Op("rms_norm", _reference, _cases, _tolerance)
