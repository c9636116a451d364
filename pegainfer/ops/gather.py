"""Rows by index: `out[r] = x[indices[r]]`; picks the hidden states whose logits are wanted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.runtime.dtypes import DType

__all__ = ["GatherRowsFacts", "gather_rows"]


@dataclass(frozen=True, slots=True)
class GatherRowsFacts:
    """`size` is the width of a row."""

    size: int
    act: DType


def _reference(
    facts: GatherRowsFacts,
    *,
    x: np.ndarray[Any, Any],
    indices: np.ndarray[Any, Any],
    out: np.ndarray[Any, Any],
) -> None:
    out[...] = x[indices]


def _cases(rng: np.random.Generator) -> Iterator[Case[GatherRowsFacts]]:
    for act in (DType.float32, DType.bfloat16):
        for rows, size, indices in ((1, 576, [0]), (9, 50, [8, 0, 3, 3]), (40, 1024, [39, 7])):
            yield Case(
                name=f"{act}-{len(indices)}of{rows}x{size}",
                facts=GatherRowsFacts(size=size, act=act),
                arguments={
                    "x": rng.normal(0, 1, (rows, size)).astype(act.numpy),
                    "indices": np.array(indices, np.int32),
                    "out": np.zeros((len(indices), size), act.numpy),
                },
                outputs=("out",),
            )


def _tolerance(facts: GatherRowsFacts) -> float:
    return 0.0


gather_rows: Op[GatherRowsFacts] = Op("gather_rows", _reference, _cases, _tolerance)
