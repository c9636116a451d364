"""`out = x W^T (+ bias)`, or `out += x W^T (+ bias)`: the multiplication by a checkpoint's matrix.

How the activations meet a weight follows from its format, and the reference does the same, so that providers
are compared tightly:

- `f32`, `f16`, `fp8`: activations in float32.
- `bf16`: activations rounded to bfloat16, sums in float32.
- `q8_0`, `q4_0`, `q4_1`: activations quantised to int8 in groups of 32 (scale `max|x| / 127`), integer dot
  products, and one product of scales per group.

Weights are packed by the launcher that uses them; packed bytes mean nothing to anybody else. A row of the
result never depends on the other rows of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import FP8_BLOCK, DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = [
    "LinearFacts",
    "PackedWeight",
    "linear",
    "quantize_groups",
    "random_weight",
]

Array = np.ndarray[Any, Any]

GROUP = 32  # activations that share a scale
_MEAN_E4M3 = 97.0  # root mean square of all finite e4m3 numbers

_INTEGERS = (WeightFormat.q8_0, WeightFormat.q4_0, WeightFormat.q4_1)
_PLAIN = {
    WeightFormat.f32: DType.float32,
    WeightFormat.f16: DType.float16,
    WeightFormat.bf16: DType.bfloat16,
}


@dataclass(frozen=True, slots=True)
class LinearFacts:
    """`act` is the element type of `x`, and of `out` unless that names its own (logits are float32)."""

    in_features: int
    out_features: int
    format: WeightFormat
    act: DType
    has_bias: bool = False
    accumulate: bool = False
    out: DType | None = None

    @property
    def out_dtype(self) -> DType:
        """Element type of the result."""
        return self.out or self.act


def quantize_groups(x: Array) -> tuple[Array, Array]:
    """Rows of float32 as int8 groups of 32 and their float32 scales `[rows, columns / 32]`."""
    groups = x.reshape(x.shape[0], -1, GROUP)
    largest = np.abs(groups).max(axis=2)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(groups * inverse[..., None]).astype(np.int8), largest / np.float32(127)


def _reference(
    facts: LinearFacts,
    *,
    x: Array,  # [T, in_features]
    weight: Array,  # uint8, rows as the checkpoint stores them
    bias: Array | None = None,  # float32 [out_features]
    out: Array,  # [T, out_features]
) -> None:
    shape = (facts.out_features, facts.in_features)
    rows_of_weight = np.ascontiguousarray(weight).reshape(facts.out_features, -1)
    raw = RawWeight.from_rows(facts.format, shape, rows_of_weight)
    values, rows = raw.dequantize(), x.astype(np.float32)
    if facts.format is WeightFormat.bf16:
        rows = rows.astype(DType.bfloat16.numpy).astype(np.float32)
    elif facts.format in _INTEGERS:
        quants, scales = quantize_groups(rows)
        rows = (quants * scales[..., None]).astype(np.float32).reshape(rows.shape)
    # One row at a time: a library may sum differently for another number of rows.
    result = np.stack([values @ row for row in rows]) if len(rows) else np.zeros((0, shape[0]), np.float32)
    if bias is not None:
        result += bias.astype(np.float32)
    out[...] = result + out.astype(np.float32) if facts.accumulate else result


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """The weight of a case: a `CaseInput` that every launcher packs for itself."""

    raw: RawWeight

    def for_reference(self, facts: Any) -> Array:
        """The rows as they are."""
        return self.raw.rows().reshape(-1)

    def for_device(self, facts: Any, device: Device, *, provider: str, launcher: Any) -> Tensor:
        """What the launcher's `pack` makes of them."""
        packed = launcher.pack(self.raw)
        assert isinstance(packed, Tensor)
        assert packed.nbytes == launcher.packed_bytes()
        return packed


def random_weight(rng: np.random.Generator, format: WeightFormat, rows: int, columns: int) -> RawWeight:
    """A matrix of about unit gain in a checkpoint's format."""
    scale = columns**-0.5
    if not format.is_quantized:
        values = rng.normal(0, scale, (rows, columns)).astype(_PLAIN[format].numpy)
        return RawWeight(format, (rows, columns), values.view(np.uint8))
    if format is WeightFormat.fp8:
        return _random_fp8(rng, rows, columns)
    blocks = rng.integers(0, 256, (rows, columns // format.block_size, format.block_bytes), np.uint8)
    largest = 128 if format is WeightFormat.q8_0 else 8
    header = (2 * scale / largest * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
    blocks[..., :2] = header[..., None].view(np.uint8)
    if format is WeightFormat.q4_1:
        blocks[..., 2:4] = (header * -7.5).astype(np.float16)[..., None].view(np.uint8)
    return RawWeight(format, (rows, columns), blocks.reshape(rows, -1))


def _random_fp8(rng: np.random.Generator, rows: int, columns: int) -> RawWeight:
    """All numbers that there are, and scales of any float32 value."""
    codes = (
        rng.integers(0, 127, (rows, columns), np.uint8) | rng.integers(0, 2, (rows, columns), np.uint8) << 7
    )
    blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    scales = columns**-0.5 / _MEAN_E4M3 * rng.uniform(0.3, 1.7, blocks)
    by_row = np.repeat(scales.astype(np.float32), FP8_BLOCK, axis=0)[:rows]
    return RawWeight(WeightFormat.fp8, (rows, columns), codes.astype(np.uint8), by_row)


def _cases(rng: np.random.Generator) -> Iterator[Case[LinearFacts]]:
    sizes = (
        (1, 64, 48),
        (2, 576, 192),
        (3, 96, 33),
        (7, 256, 70),
        (33, 320, 160),
        (130, 64, 100),
        (1, 1536, 576),
    )
    for act in (DType.float32, DType.bfloat16):
        for format in WeightFormat:
            for rows, columns, outputs in sizes:
                for has_bias, accumulate in ((False, False), (True, False), (False, True)):
                    yield _case(rng, LinearFacts(columns, outputs, format, act, has_bias, accumulate), rows)
    for columns, outputs in ((40, 17), (2, 3), (100, 64)):  # these formats take any width
        for format in (*_PLAIN, WeightFormat.fp8):
            yield _case(rng, LinearFacts(columns, outputs, format, DType.float32), 5)
    yield _case(rng, LinearFacts(128, 300, WeightFormat.bf16, DType.bfloat16, out=DType.float32), 4)
    yield _case(rng, LinearFacts(128, 300, WeightFormat.bf16, DType.bfloat16, out=DType.float32), 40)
    bf16 = WeightFormat.bf16  # more rows than a device has a special kernel for, and around
    for rows, columns, outputs in ((17, 4096, 1280), (40, 2048, 1030), (64, 2568, 700), (65, 256, 384)):
        for has_bias, accumulate in ((True, False), (False, True)):
            yield _case(rng, LinearFacts(columns, outputs, bf16, DType.bfloat16, has_bias, accumulate), rows)
    for act in (DType.bfloat16, DType.float16):  # many blocks, whole and cut
        for rows, columns, outputs in ((3, 1024, 700), (16, 640, 2100), (50, 256, 384), (70, 384, 260)):
            for has_bias, accumulate in ((True, False), (False, True)):
                yield _case(
                    rng, LinearFacts(columns, outputs, WeightFormat.fp8, act, has_bias, accumulate), rows
                )
    yield _case(rng, LinearFacts(128, 300, WeightFormat.fp8, DType.bfloat16, out=DType.float32), 4)
    yield _case(rng, LinearFacts(128, 300, WeightFormat.fp8, DType.bfloat16, out=DType.float32), 80)


def _case(rng: np.random.Generator, facts: LinearFacts, rows: int) -> Case[LinearFacts]:
    x = rng.normal(0, 1, (rows, facts.in_features)).astype(facts.act.numpy)
    x[0, : facts.in_features // 2] = 0  # a whole group may be zero
    arguments: dict[str, Any] = {
        "x": x,
        "weight": PackedWeight(random_weight(rng, facts.format, facts.out_features, facts.in_features)),
        "out": rng.normal(0, 1, (rows, facts.out_features)).astype(facts.out_dtype.numpy),
    }
    if facts.has_bias:
        arguments["bias"] = rng.normal(0, 1, facts.out_features).astype(np.float32)
    flags = "".join(f"-{name}" for name in ("has_bias", "accumulate") if getattr(facts, name))
    sizes = f"{rows}x{facts.in_features}x{facts.out_features}"
    return Case(
        name=f"{facts.act}-{facts.format}-{sizes}{flags}-{facts.out_dtype}",
        facts=facts,
        arguments=arguments,
        outputs=("out",),
    )


def _tolerance(facts: LinearFacts) -> float:
    """A 16-bit result is rounded once. A device with 16-bit activations expands quantised weights to their
    type and leaves the activations as they are.
    """
    if facts.act is not DType.float32:
        return 2e-2 if facts.format in _INTEGERS else 5e-3
    return 2e-5 if facts.format in (WeightFormat.bf16, *_INTEGERS) else 2e-6


linear: Op[LinearFacts] = Op("linear", _reference, _cases, _tolerance)
