"""`RawWeight`: a weight as a checkpoint stores it, and the values that its bytes mean."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.runtime.dtypes import FP8_BLOCK, DType, WeightFormat

__all__ = ["RawWeight", "require_parts", "stack"]

_PLAIN = {
    WeightFormat.f32: DType.float32.numpy,
    WeightFormat.f16: DType.float16.numpy,
    WeightFormat.bf16: DType.bfloat16.numpy,
}


@dataclass(frozen=True, slots=True, eq=False)
class RawWeight:
    """A weight in its stored format.

    `shape` is the logical shape, outermost dimension first: `(out, in)` for a matrix, `(size,)` for a vector.
    `data` is uint8 `[rows, row_bytes]`, where a row is the last dimension (a vector is one row); it may be a
    view of a mapped file, so it is only to be read. An `fp8` weight is a matrix; its `data` are the numbers
    alone, and `scales` holds the scale of each row and 128 columns, float32 `[rows, ceil(columns / 128)]`:
    matrices whose rows are no multiple of 128 can be stacked like any others. Raises `WeightsError` if `data`
    or `scales` do not fit `shape`.
    """

    format: WeightFormat
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]
    scales: np.ndarray[Any, np.dtype[np.float32]] | None = None

    @classmethod
    def from_rows(
        cls, format: WeightFormat, shape: tuple[int, ...], rows: np.ndarray[Any, np.dtype[np.uint8]]
    ) -> RawWeight:
        """The weight of `rows`, as `rows()` gives them."""
        if format is not WeightFormat.fp8:
            return cls(format, shape, rows)
        scales = np.ascontiguousarray(rows[:, shape[-1] :]).view(np.float32)
        return cls(format, shape, rows[:, : shape[-1]], scales)

    def __post_init__(self) -> None:
        rows, columns = self.num_rows, self.shape[-1] if self.shape else 1
        if columns % self.format.block_size:
            raise WeightsError(
                f"rows of {columns} values are not whole {self.format} blocks of {self.format.block_size}"
            )
        is_fp8 = self.format is WeightFormat.fp8
        if is_fp8 != (self.scales is not None) or (is_fp8 and len(self.shape) != 2):
            raise WeightsError(f"a {self.format} weight of shape {list(self.shape)} with or without scales")
        expected = (rows, columns if is_fp8 else self.format.row_bytes(columns))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise WeightsError(
                f"a {self.format} weight of shape {list(self.shape)} needs uint8 data of shape "
                f"{list(expected)}, got {self.data.dtype} of shape {list(self.data.shape)}"
            )
        scales = (rows, -(-columns // FP8_BLOCK))
        if self.scales is not None and (self.scales.dtype != np.float32 or self.scales.shape != scales):
            raise WeightsError(
                f"an fp8 weight of shape {list(self.shape)} needs float32 scales of shape {list(scales)}, "
                f"got {self.scales.dtype} of shape {list(self.scales.shape)}"
            )

    @property
    def num_rows(self) -> int:
        """Rows of `data`: the product of all dimensions but the last."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def rows(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows that can stand alone, uint8 `[rows, row_bytes]`: `data`, and behind each row its scales."""
        if self.scales is None:
            return self.data
        scales = np.ascontiguousarray(self.scales).view(np.uint8)
        return np.concatenate([self.data, scales], axis=1)

    def require(self, format: WeightFormat, shape: tuple[int, ...]) -> None:
        """Raise `WeightsError` unless this is a weight of that format and shape."""
        if self.format is not format or self.shape != shape:
            raise WeightsError(
                f"expected a {format} weight of shape {list(shape)}, got {self.format} {list(self.shape)}"
            )

    def dequantize(self) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The values as a new float32 array of `shape`."""
        if self.format in _PLAIN:
            plain = np.ascontiguousarray(self.data).view(_PLAIN[self.format])
            return plain.astype(np.float32).reshape(self.shape)
        if self.scales is not None:
            values: np.ndarray[Any, np.dtype[np.float32]] = _E4M3[self.data]
            values *= np.repeat(self.scales, FP8_BLOCK, axis=1)[:, : self.shape[1]]
            return values
        blocks = np.ascontiguousarray(self.data).reshape(-1, self.format.block_bytes)
        return _DEQUANTIZE[self.format](blocks).reshape(self.shape)


def stack(parts: Sequence[RawWeight]) -> RawWeight:
    """Matrices of one format and width below one another."""
    if len(parts) == 1:
        return parts[0]
    rows = sum(raw.shape[0] for raw in parts)
    scales = [raw.scales for raw in parts if raw.scales is not None]
    return RawWeight(
        parts[0].format,
        (rows, parts[0].shape[1]),
        np.concatenate([raw.data for raw in parts]),
        np.concatenate(scales) if scales else None,
    )


def require_parts(parts: Sequence[RawWeight], format: WeightFormat, shape: tuple[int, int]) -> None:
    """Raise `WeightsError` unless matrices are of that format and below one another of that shape."""
    rows = 0
    for raw in parts:
        raw.require(format, (raw.shape[0], shape[1]))
        rows += raw.shape[0]
    if rows != shape[0]:
        raise WeightsError(f"expected a {format} weight of shape {list(shape)}, got {rows} rows")


_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


Blocks = np.ndarray[Any, np.dtype[np.uint8]]  # [num_blocks, block_bytes]
Values = np.ndarray[Any, np.dtype[np.float32]]  # [num_blocks, 32]


def _half(blocks: Blocks, start: int) -> Values:
    """The float16 at byte `start` of every block, as a float32 column."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Blocks, start: int) -> Values:
    """The 32 four-bit numbers from byte `start` on: the low halves of the bytes, then the high halves."""
    packed = blocks[:, start:]
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def _q8_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _q4_0(blocks: Blocks) -> Values:
    return _half(blocks, 0) * (_nibbles(blocks, 2) - np.float32(8.0))


def _q4_1(blocks: Blocks) -> Values:
    return _half(blocks, 0) * _nibbles(blocks, 4) + _half(blocks, 2)


_DEQUANTIZE = {WeightFormat.q8_0: _q8_0, WeightFormat.q4_0: _q4_0, WeightFormat.q4_1: _q4_1}
