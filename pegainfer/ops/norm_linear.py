"""RMSNorm, a multiplication and, where it is gated, SwiGLU in one: what a device may fuse.

`out = linear(rms_norm(x))`, or with `gated`, where the weight has gate rows, then up rows,
`out = silu(gate) * up`. The weight is the packed weight of the device's `linear` over the same matrix;
`normed` is scratch. A provider's launcher has `serves(rows)`: other numbers of rows take one launch a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.activation import silu
from pegainfer.ops.linear import LinearFacts, linear, random_weight
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.op import Case, Op, bind
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = ["NormLinearFacts", "norm_linear"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class NormLinearFacts:
    """`out_features` are the columns of `out`; a gated weight has twice as many rows."""

    in_features: int
    out_features: int
    format: WeightFormat
    act: DType
    eps: float
    has_bias: bool = False
    gated: bool = False
    out: DType | None = None

    @property
    def linear(self) -> LinearFacts:
        """The multiplication inside, whose packed weight this op takes."""
        rows = self.out_features * (2 if self.gated else 1)
        return LinearFacts(self.in_features, rows, self.format, self.act, self.has_bias, out=self.out)


def _reference(
    facts: NormLinearFacts,
    *,
    x: Array,  # [T, in_features]
    norm: Array,  # float32 [in_features]
    weight: Array,  # uint8
    normed: Array,  # [T, in_features]
    bias: Array | None = None,  # float32, one per row of the weight
    out: Array,  # [T, out_features]
) -> None:
    exact, wide = (
        np.zeros(x.shape, np.float32),
        np.zeros((x.shape[0], facts.linear.out_features), np.float32),
    )
    rms_norm.reference(RmsNormFacts(facts.in_features, facts.eps, DType.float32), x=x, weight=norm, out=exact)
    linear.reference(facts.linear, x=exact, weight=weight, bias=bias, out=wide)
    half = facts.out_features
    out[...] = silu(wide[:, :half]) * wide[:, half:] if facts.gated else wide


@dataclass(frozen=True, slots=True, eq=False)
class _LinearWeight:
    """The weight of a case, packed by the device's linear op."""

    raw: RawWeight

    def for_reference(self, facts: NormLinearFacts) -> Array:
        """The rows as they are."""
        return self.raw.rows().reshape(-1)

    def for_device(self, facts: NormLinearFacts, device: Device, *, provider: str, launcher: Any) -> Tensor:
        """Packed by the linear provider of the same name."""
        factory = next(p.factory for p in linear.providers if p.name == provider and p.kind is device.kind)
        owner: Any = factory(facts.linear, device) or bind(linear, facts.linear, device)
        packed = owner.pack(self.raw)
        assert isinstance(packed, Tensor)
        return packed


def _cases(rng: np.random.Generator) -> Iterator[Case[NormLinearFacts]]:
    bf16, fp8 = WeightFormat.bf16, WeightFormat.fp8
    for format, rows, columns, outputs, gated, has_bias, out in (
        (bf16, 1, 2560, 640, False, False, None),
        (bf16, 3, 128, 70, False, True, None),
        (bf16, 8, 576, 192, True, False, None),
        (bf16, 9, 192, 77, True, True, None),
        (bf16, 16, 1024, 300, False, False, DType.float32),
        (bf16, 12, 2560, 640, False, True, None),
        (bf16, 33, 1024, 1540, True, False, None),
        (bf16, 64, 4096, 250, True, True, None),
        (bf16, 100, 576, 1536, True, False, None),
        (bf16, 128, 320, 90, True, True, None),
        (bf16, 1300, 192, 1400, True, False, None),  # fills the multiprocessors of a large GPU
        (bf16, 2800, 64, 1320, True, True, None),
        (fp8, 1, 2560, 640, False, False, None),
        (fp8, 3, 128, 70, False, True, None),
        (fp8, 8, 640, 384, True, False, None),
        (fp8, 9, 256, 128, True, True, None),
        (fp8, 16, 1024, 300, False, False, DType.float32),
    ):
        facts = NormLinearFacts(
            columns, outputs, format, DType.bfloat16, 1e-6, has_bias=has_bias, gated=gated, out=out
        )
        weight_rows = facts.linear.out_features
        arguments: dict[str, Any] = {
            "x": rng.normal(0, 2, (rows, columns)).astype(facts.act.numpy),
            "norm": rng.normal(1, 0.2, columns).astype(np.float32),
            "weight": _LinearWeight(random_weight(rng, facts.format, weight_rows, columns)),
            "normed": np.zeros((rows, columns), facts.act.numpy),
            "out": np.zeros((rows, outputs), facts.linear.out_dtype.numpy),
        }
        if has_bias:
            arguments["bias"] = rng.normal(0, 1, weight_rows).astype(np.float32)
        flags = f"{'-gated' if gated else ''}{'-bias' if has_bias else ''}"
        yield Case(
            name=f"{format}-{rows}x{columns}x{outputs}{flags}",
            facts=facts,
            arguments=arguments,
            outputs=("out",),
        )


def _tolerance(facts: NormLinearFacts) -> float:
    """The normalised row, the product and the gate are each rounded to 16 bits at most once."""
    return 8e-3


norm_linear: Op[NormLinearFacts] = Op("norm_linear", _reference, _cases, _tolerance)
