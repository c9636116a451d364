"""The tensor types of GGUF: those that ops compute with as stored, and those that are re-encoded as Q8_0 when
they are read, which loses next to nothing but takes more memory than the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.runtime.dtypes import WeightFormat

__all__ = ["GgufType", "gguf_type", "supported_types"]

Blocks = np.ndarray[Any, np.dtype[np.uint8]]  # [num_blocks, block_bytes]
Values = np.ndarray[Any, np.dtype[np.float32]]  # [num_blocks, block_size]


@dataclass(frozen=True, slots=True)
class GgufType:
    """A tensor type. `format` is what readers of the tensor get; `decode` makes float values of the stored
    blocks where that is another one, else it is None.
    """

    name: str
    format: WeightFormat
    block_size: int
    block_bytes: int
    decode: Callable[[Blocks], Values] | None = None


def gguf_type(number: int) -> GgufType | str:
    """The type with this number in a file, or the name of one that is not supported."""
    return _TYPES.get(number) or _OTHERS.get(number, str(number))


def supported_types() -> list[str]:
    """Names of all types that can be read."""
    return [kind.name for kind in _TYPES.values()]


def _half(blocks: Blocks, start: int) -> Values:
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _fifth_bits(blocks: Blocks, start: int) -> Blocks:
    """The highest bits of 32 five-bit numbers, in four bytes from `start` on, as 0 or 16."""
    return np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little") << np.uint8(4)


def _nibbles(packed: Blocks) -> Blocks:
    """The low halves of 16 bytes, then the high halves."""
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _q5_0(blocks: Blocks) -> Values:
    codes = (_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2)).astype(np.float32)
    return _half(blocks, 0) * (codes - np.float32(16.0))


def _q5_1(blocks: Blocks) -> Values:
    codes = (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)).astype(np.float32)
    return _half(blocks, 0) * codes + _half(blocks, 2)


def _scales_and_minima(blocks: Blocks) -> tuple[Values, Values]:
    """Scale and minimum of the eight groups of 32: six-bit numbers in the 12 bytes after two float16 factors.

    The first four of each are the low bits of bytes 0 to 3 and 4 to 7; the others have their low four bits in
    the halves of bytes 8 to 11 and their high two bits on top of the first eight bytes.
    """
    packed = blocks[:, 4:16]
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = [first & 63, rest & 15 | first >> 6 << 4]
    minima = [second & 63, rest >> 4 | second >> 6 << 4]
    return (
        _half(blocks, 0) * np.concatenate(scales, axis=1).astype(np.float32),
        _half(blocks, 2) * np.concatenate(minima, axis=1).astype(np.float32),
    )


def _k_nibbles(packed: Blocks) -> Blocks:
    """128 bytes as `[num_blocks, 8, 32]`: each 32 bytes hold one group in their low, the next in their high
    halves.
    """
    quarters = packed.reshape(-1, 4, 1, 32)
    shifts = np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (quarters >> shifts & np.uint8(15)).reshape(-1, 8, 32)


def _q4_k(blocks: Blocks) -> Values:
    scales, minima = _scales_and_minima(blocks)
    codes = _k_nibbles(blocks[:, 16:]).astype(np.float32)
    return (scales[:, :, None] * codes - minima[:, :, None]).reshape(-1, 256)


def _q5_k(blocks: Blocks) -> Values:
    scales, minima = _scales_and_minima(blocks)
    groups = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
    fifth = blocks[:, 16:48].reshape(-1, 1, 32) >> groups & np.uint8(1)
    codes = (_k_nibbles(blocks[:, 48:]) | fifth << np.uint8(4)).astype(np.float32)
    return (scales[:, :, None] * codes - minima[:, :, None]).reshape(-1, 256)


def _q6_k(blocks: Blocks) -> Values:
    low = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    codes = (low & np.uint8(15)).reshape(-1, 16, 16) | ((high & np.uint8(3)) << np.uint8(4)).reshape(
        -1, 16, 16
    )
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return (scales[:, :, None] * (codes.astype(np.float32) - np.float32(32.0))).reshape(-1, 256)


def _as_stored(format: WeightFormat) -> GgufType:
    return GgufType(format.upper(), format, format.block_size, format.block_bytes)


_TYPES = {
    0: _as_stored(WeightFormat.f32),
    1: _as_stored(WeightFormat.f16),
    2: _as_stored(WeightFormat.q4_0),
    3: _as_stored(WeightFormat.q4_1),
    8: _as_stored(WeightFormat.q8_0),
    30: _as_stored(WeightFormat.bf16),
    6: GgufType("Q5_0", WeightFormat.q8_0, 32, 22, _q5_0),
    7: GgufType("Q5_1", WeightFormat.q8_0, 32, 24, _q5_1),
    12: GgufType("Q4_K", WeightFormat.q8_0, 256, 144, _q4_k),
    13: GgufType("Q5_K", WeightFormat.q8_0, 256, 176, _q5_k),
    14: GgufType("Q6_K", WeightFormat.q8_0, 256, 210, _q6_k),
}
_OTHERS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
