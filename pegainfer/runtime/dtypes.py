"""Element types and the storage formats of weights. Knows sizes and NumPy equivalents, nothing of devices."""

from __future__ import annotations

from enum import StrEnum

import ml_dtypes
import numpy as np

__all__ = ["FP8_BLOCK", "DType", "WeightFormat"]

FP8_BLOCK = 128
"""Rows and columns of an fp8 matrix that share a scale."""


class DType(StrEnum):
    """Element type of a `Tensor`."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    int64 = "int64"
    int32 = "int32"
    int8 = "int8"
    uint8 = "uint8"
    uint32 = "uint32"
    uint64 = "uint64"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _NUMPY[self].itemsize

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The equivalent NumPy dtype (`ml_dtypes.bfloat16` for bfloat16)."""
        return _NUMPY[self]

    @classmethod
    def of(cls, dtype: np.dtype[np.generic]) -> DType:
        """The `DType` of a NumPy dtype; raises `KeyError` for one that tensors cannot hold."""
        return _FROM_NUMPY[dtype]


_NUMPY: dict[DType, np.dtype[np.generic]] = {
    DType.float32: np.dtype(np.float32),
    DType.bfloat16: np.dtype(ml_dtypes.bfloat16),
    DType.float16: np.dtype(np.float16),
    DType.int64: np.dtype(np.int64),
    DType.int32: np.dtype(np.int32),
    DType.int8: np.dtype(np.int8),
    DType.uint8: np.dtype(np.uint8),
    DType.uint32: np.dtype(np.uint32),
    DType.uint64: np.dtype(np.uint64),
}
_FROM_NUMPY = {numpy: dtype for dtype, numpy in _NUMPY.items()}


class WeightFormat(StrEnum):
    """How a weight matrix is stored: a plain element type, or quantised values that share scales.

    Most quantised formats are those of GGUF: a row is a sequence of blocks of 32 values.
    `q8_0`: fp16 scale, 32 int8. `q4_0`: fp16 scale, 16 bytes of nibbles, value `d * (q - 8)`.
    `q4_1`: fp16 scale, fp16 minimum, 16 bytes of nibbles, value `d * q + m`. In a nibble byte `j` the low
    half is value `j`, the high half value `j + 16`.

    `fp8` is that of Hugging Face checkpoints: e4m3 numbers, and a float32 scale for each block of 128 x 128
    of them (those at the edges may be smaller). Scales lie apart from the numbers; `row_bytes` counts what a
    row needs on its own: a byte a number, then the scales of its blocks.
    """

    f32 = "f32"
    f16 = "f16"
    bf16 = "bf16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"
    q4_1 = "q4_1"
    fp8 = "fp8"

    @property
    def block_size(self) -> int:
        """Values that a row can only hold together (1 where it may have any length)."""
        return _BLOCK[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCK[self][1]

    @property
    def is_quantized(self) -> bool:
        """Whether values share scales."""
        return self.block_size > 1 or self is WeightFormat.fp8

    def row_bytes(self, columns: int) -> int:
        """Bytes of one row of `columns` values; raises `ValueError` if `columns` is not a whole number of
        blocks.
        """
        if columns % self.block_size:
            raise ValueError(
                f"{columns} columns are not a whole number of {self} blocks of {self.block_size}"
            )
        scales = -(-columns // FP8_BLOCK) * 4 if self is WeightFormat.fp8 else 0
        return columns // self.block_size * self.block_bytes + scales


_BLOCK: dict[WeightFormat, tuple[int, int]] = {
    WeightFormat.f32: (1, 4),
    WeightFormat.f16: (1, 2),
    WeightFormat.bf16: (1, 2),
    WeightFormat.q8_0: (32, 34),
    WeightFormat.q4_0: (32, 18),
    WeightFormat.q4_1: (32, 20),
    WeightFormat.fp8: (1, 1),
}
