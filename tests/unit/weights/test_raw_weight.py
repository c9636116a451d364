"""Storage formats: what the bytes mean, and rounding into them."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.quantized import quantize

IN_BLOCKS = [format for format in WeightFormat if format.block_size > 1]


def value_of(format: WeightFormat, block: bytes, index: int) -> float:
    """One value of one block, by the definition of the format."""
    (scale,) = struct.unpack_from("<e", block)
    if format is WeightFormat.q8_0:
        return float(np.float32(scale) * np.float32(struct.unpack_from("<b", block, 2 + index)[0]))
    start = 2 if format is WeightFormat.q4_0 else 4
    byte = block[start + index % 16]
    code = byte & 15 if index < 16 else byte >> 4
    if format is WeightFormat.q4_0:
        return float(np.float32(scale) * np.float32(code - 8))
    (minimum,) = struct.unpack_from("<e", block, 2)
    return float(np.float32(scale) * np.float32(code) + np.float32(minimum))


@pytest.mark.parametrize("format", IN_BLOCKS)
def test_blocks_mean_what_the_format_says(format: WeightFormat) -> None:
    rng = np.random.default_rng(1)
    rows, columns = 3, 64
    data = rng.integers(0, 256, (rows, format.row_bytes(columns)), dtype=np.uint8)
    blocks = data.reshape(-1, format.block_bytes)
    blocks[:, :2] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    if format is WeightFormat.q4_1:
        blocks[:, 2:4] = rng.normal(size=(len(blocks), 1)).astype(np.float16).view(np.uint8)
    values = RawWeight(format, (rows, columns), data).dequantize()
    expected = [value_of(format, block.tobytes(), i) for block in blocks for i in range(32)]
    np.testing.assert_array_equal(values, np.array(expected, np.float32).reshape(rows, columns))


@pytest.mark.parametrize(("format", "levels"), [("q8_0", 127), ("q4_0", 7), ("q4_1", 15)])
def test_rounding_error_is_half_a_step(format: str, levels: int) -> None:
    values = np.random.default_rng(2).normal(size=(7, 96)).astype(np.float32)
    raw = quantize(values, WeightFormat(format))
    groups = values.reshape(-1, 32)
    spread = groups.max(1) - groups.min(1) if format == "q4_1" else np.abs(groups).max(1)
    step = spread / levels
    error = np.abs(raw.dequantize().reshape(-1, 32) - groups).max(1)
    # Scales are float16, and `q4_0` has one code less on one side.
    assert (error <= step * (1.01 if format == "q4_0" else 0.51) + 2e-3).all()


@pytest.mark.parametrize("format", list(WeightFormat))
def test_rounding_twice_changes_nothing(format: WeightFormat) -> None:
    values = np.random.default_rng(3).normal(size=(4, 64)).astype(np.float32)
    once = quantize(values, format).dequantize()
    twice = quantize(once, format).dequantize()
    np.testing.assert_allclose(twice, once, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("format", list(WeightFormat))
def test_zeros_stay_zeros(format: WeightFormat) -> None:
    assert not quantize(np.zeros((2, 32), np.float32), format).dequantize().any()


@given(st.sampled_from([WeightFormat.f32, WeightFormat.f16, WeightFormat.bf16]), st.integers(0, 5))
def test_plain_formats_keep_their_values(format: WeightFormat, columns: int) -> None:
    values = np.arange(3 * columns, dtype=np.float32).reshape(3, columns)
    raw = quantize(values, format)
    assert raw.data.shape == (3, columns * format.block_bytes)
    np.testing.assert_array_equal(raw.dequantize(), values)


def test_vectors_and_stacks() -> None:
    vector = quantize(np.arange(5, dtype=np.float32), WeightFormat.bf16)
    assert (vector.shape, vector.data.shape) == ((5,), (1, 10))
    stack = quantize(np.zeros((2, 3, 64), np.float32), WeightFormat.q4_0)
    assert (stack.shape, stack.data.shape, stack.dequantize().shape) == ((2, 3, 64), (6, 36), (2, 3, 64))


@pytest.mark.parametrize(
    ("format", "shape", "data"),
    [
        ("f32", (2, 3), np.zeros((2, 11), np.uint8)),
        ("f32", (2, 3), np.zeros((3, 12), np.uint8)),
        ("f32", (2, 3), np.zeros((2, 3), np.float32)),
        ("q8_0", (2, 33), np.zeros((2, 34), np.uint8)),
    ],
)
def test_bytes_that_do_not_fit_the_shape(format: str, shape: tuple[int, ...], data: np.ndarray) -> None:
    with pytest.raises(WeightsError):
        RawWeight(WeightFormat(format), shape, data)


def test_rows_that_are_no_whole_blocks() -> None:
    with pytest.raises(ValueError, match="whole number"):
        quantize(np.zeros((2, 33), np.float32), WeightFormat.q4_1)
