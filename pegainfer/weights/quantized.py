"""Quantisation of float values into the quantised formats: for dummy weights, model writers and tests."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np

from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import FP8_BLOCK, DType, WeightFormat

__all__ = ["quantize"]

_E4M3_MAX = 448.0
_PLAIN = {
    WeightFormat.f32: DType.float32.numpy,
    WeightFormat.f16: DType.float16.numpy,
    WeightFormat.bf16: DType.bfloat16.numpy,
}


def quantize(values: np.ndarray[Any, Any], format: WeightFormat) -> RawWeight:
    """`values` (any shape, but a matrix for fp8) rounded to `format`. The last dimension must be whole
    blocks; raises `ValueError`.
    """
    if format is WeightFormat.fp8:
        return _fp8(values.astype(np.float32))
    row_bytes = format.row_bytes(values.shape[-1])
    if format in _PLAIN:
        data = np.ascontiguousarray(values.astype(_PLAIN[format])).view(np.uint8)
    else:
        groups = values.astype(np.float32).reshape(-1, format.block_size)
        data = _QUANTIZE[format](groups)
    return RawWeight(format, values.shape, data.reshape(math.prod(values.shape[:-1]), row_bytes))


def _fp8(values: np.ndarray[Any, np.dtype[np.float32]]) -> RawWeight:
    """A scale for every 128 x 128 values, at which the largest of them is the largest e4m3 number."""
    if values.ndim != 2 or not values.size:
        raise ValueError(f"an fp8 weight is a matrix, not an array of shape {list(values.shape)}")
    rows, columns = values.shape
    largest = np.maximum.reduceat(np.abs(values), np.arange(0, rows, FP8_BLOCK), axis=0)
    largest = np.maximum.reduceat(largest, np.arange(0, columns, FP8_BLOCK), axis=1)
    scales = np.where(largest > 0, largest / np.float32(_E4M3_MAX), np.float32(1.0))
    scales = np.repeat(scales, FP8_BLOCK, axis=0)[:rows]
    numbers = values / np.repeat(scales, FP8_BLOCK, axis=1)[:, :columns]
    data = numbers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    return RawWeight(WeightFormat.fp8, (rows, columns), data, scales)


Groups = np.ndarray[Any, np.dtype[np.float32]]  # [num_blocks, 32]
Blocks = np.ndarray[Any, np.dtype[np.uint8]]  # [num_blocks, block_bytes]


def _codes(shifted: Groups, scale: Groups, low: int, high: int) -> np.ndarray[Any, Any]:
    """`shifted / scale` rounded into `[low, high]`; 0 where the scale is 0."""
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)
    return np.clip(np.rint(shifted * inverse), low, high)


def _bytes(column: Groups) -> Blocks:
    return column.astype(np.float16).view(np.uint8)


def _pack(codes: np.ndarray[Any, Any]) -> Blocks:
    nibbles = codes.astype(np.uint8)
    return np.bitwise_or(nibbles[:, :16], np.left_shift(nibbles[:, 16:], np.uint8(4)))


def _q8_0(groups: Groups) -> Blocks:
    scale = np.abs(groups).max(axis=1, keepdims=True) / np.float32(127.0)
    codes = _codes(groups, scale, -127, 127).astype(np.int8)
    return np.concatenate([_bytes(scale), codes.view(np.uint8)], axis=1)


def _q4_0(groups: Groups) -> Blocks:
    # The value of the largest magnitude becomes code 0 (-8): the one end of the range that is used fully.
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    scale = extreme / np.float32(-8.0)
    return np.concatenate([_bytes(scale), _pack(_codes(groups, scale, -8, 7) + 8)], axis=1)


def _q4_1(groups: Groups) -> Blocks:
    minimum = groups.min(axis=1, keepdims=True)
    scale = (groups.max(axis=1, keepdims=True) - minimum) / np.float32(15.0)
    codes = _pack(_codes(groups - minimum, scale, 0, 15))
    return np.concatenate([_bytes(scale), _bytes(minimum), codes], axis=1)


_QUANTIZE = {WeightFormat.q8_0: _q8_0, WeightFormat.q4_0: _q4_0, WeightFormat.q4_1: _q4_1}
