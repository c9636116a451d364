"""FP8 matrices: a pair of tensors reads as one, and what does not fit together is one clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pegainfer.errors import UnsupportedModelError, WeightsError
from pegainfer.ops.raw_weight import RawWeight, stack
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.dummy import DummyCheckpoint
from pegainfer.weights.fp8 import check_quantization
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsCheckpoint
from tests.fp8_files import FP8
from tests.model_files import write_tensors

Array = np.ndarray[Any, Any]
NAME = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{NAME}_scale_inv"
ROWS, COLUMNS = 200, 300


def numbers() -> Array:
    """Codes of all finite numbers, in no order."""
    codes = np.arange(ROWS * COLUMNS) * 7 % 254
    return (codes + (codes >= 127)).astype(np.uint8).reshape(ROWS, COLUMNS)


def factors() -> Array:
    return np.array([[0.5, 3.0, 0.001], [2.0, 0.3, 7.0]], np.float32)


def meaning(codes: Array, scales: Array) -> Array:
    """The values one by one, by the definition."""
    out = np.empty(codes.shape, np.float32)
    for row, column in np.ndindex(codes.shape):
        sign, exponent, mantissa = (
            codes[row, column] >> 7,
            codes[row, column] >> 3 & 15,
            codes[row, column] & 7,
        )
        magnitude = (
            mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (int(exponent) - 7)
        )
        out[row, column] = np.float32(magnitude * (-1) ** int(sign)) * scales[row // 128, column // 128]
    return out


def checkpoint(directory: Path, files: dict[str, dict[str, tuple[str, Array]]]) -> SafetensorsCheckpoint:
    """Shards with these tensors: names to a type and an array of its bytes or numbers."""
    weight_map = {}
    for file, tensors in files.items():
        header, offset = {}, 0
        for name, (dtype, array) in tensors.items():
            stop = offset + array.nbytes
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, stop]}
            offset, weight_map[name] = stop, file
        write_tensors(
            directory / file, header, [array.reshape(-1).view(np.uint8) for _, array in tensors.values()]
        )
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return SafetensorsCheckpoint(directory, {"num_hidden_layers": 1}, {})


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_numbers_and_factors_are_one_tensor(tmp_path: Path, dtype: str) -> None:
    scales = factors().astype(np.float32 if dtype == "F32" else ml_dtypes.bfloat16)
    files = {
        "a.safetensors": {SCALES: (dtype, scales)},
        "b.safetensors": {"pad": ("U8", np.zeros(3, np.uint8)), NAME: ("F8_E4M3", numbers())},
    }
    found = checkpoint(tmp_path, files)
    assert found.names() == ["pad", NAME]
    info = found.info(NAME)
    assert (info.format, info.shape) == (WeightFormat.fp8, (ROWS, COLUMNS))
    raw = found.get(NAME)
    np.testing.assert_array_equal(raw.dequantize(), meaning(numbers(), scales.astype(np.float32)))
    assert raw.nbytes == ROWS * info.format.row_bytes(COLUMNS)


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        (None, "has no .*_scale_inv"),
        (("F32", factors().T.copy()), r"\[3, 2\].*needs \[2, 3\]"),
        (("F32", factors().reshape(-1)), r"\[6\].*needs \[2, 3\]"),
        (("F32", np.float32([[1.0]])), r"\[1, 1\].*needs \[2, 3\]"),
        (("I32", factors()), "type I32"),
        (("F8_E4M3", np.zeros((2, 3), np.uint8)), "type F8_E4M3"),
    ],
)
def test_factors_that_do_not_fit_are_known_from_the_header(
    tmp_path: Path, scales: tuple[str, Array] | None, problem: str
) -> None:
    tensors = {NAME: ("F8_E4M3", numbers())} | ({SCALES: scales} if scales else {})
    found = checkpoint(tmp_path, {"a.safetensors": tensors})
    with pytest.raises(WeightsError, match=problem) as caught:
        found.info(NAME)
    assert NAME in str(caught.value)
    with pytest.raises(WeightsError, match=problem):
        found.get(NAME)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_factors_that_are_no_numbers(tmp_path: Path, value: float) -> None:
    scales = factors()
    scales[1, 2] = value
    tensors = {NAME: ("F8_E4M3", numbers()), SCALES: ("F32", scales)}
    with pytest.raises(WeightsError, match="not finite"):
        checkpoint(tmp_path, {"a.safetensors": tensors}).get(NAME)


def test_only_matrices_are_fp8(tmp_path: Path) -> None:
    tensors = {NAME: ("F8_E4M3", numbers()[0]), SCALES: ("F32", factors())}
    with pytest.raises(WeightsError, match=r"\[300\]"):
        checkpoint(tmp_path, {"a.safetensors": tensors}).info(NAME)


def test_factors_of_what_is_not_fp8_stay_a_tensor(tmp_path: Path) -> None:
    """So that whoever matches names complains of it."""
    plain = ("F32", np.zeros((ROWS, COLUMNS), np.float32))
    found = checkpoint(tmp_path, {"a.safetensors": {NAME: plain, SCALES: ("F32", factors())}})
    assert found.names() == [NAME, SCALES]
    assert found.info(NAME).format is WeightFormat.f32


def test_rows_stand_alone() -> None:
    by_row = np.repeat(factors(), 128, axis=0)[:ROWS]
    raw = RawWeight(WeightFormat.fp8, (ROWS, COLUMNS), numbers(), by_row)
    rows = raw.rows()
    assert rows.shape == (ROWS, WeightFormat.fp8.row_bytes(COLUMNS))
    some = [3, 199, 128]
    again = RawWeight.from_rows(WeightFormat.fp8, (3, COLUMNS), rows[some])
    np.testing.assert_array_equal(again.dequantize(), meaning(numbers(), factors())[some])
    both = stack([raw, again])
    np.testing.assert_array_equal(both.dequantize(), np.concatenate([raw.dequantize(), again.dequantize()]))


@pytest.mark.parametrize("scales", [None, np.ones((2, 3), np.float32), np.ones((ROWS, 3), np.float64)])
def test_scales_that_do_not_fit(scales: Any) -> None:
    with pytest.raises(WeightsError, match="scales"):
        RawWeight(WeightFormat.fp8, (ROWS, COLUMNS), numbers(), scales)
    with pytest.raises(WeightsError, match="scales"):
        RawWeight(WeightFormat.f32, (1, 2), np.zeros((1, 8), np.uint8), np.ones((1, 1), np.float32))


def test_rounding_error_is_half_a_step() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    values *= np.repeat(np.repeat(10.0 ** rng.uniform(-5, 5, (2, 3)), 128, 0), 128, 1)[:ROWS, :COLUMNS]
    raw = quantize(values, WeightFormat.fp8)
    assert raw.scales is not None
    scales = np.repeat(raw.scales, 128, axis=1)[:, :COLUMNS]
    largest = np.abs(values[:128, 128:256]).max()
    assert np.abs(raw.dequantize()[:128, 128:256]).max() == pytest.approx(largest, rel=1e-6)
    step = np.maximum(np.abs(values) / 16, scales * 2.0**-10)
    assert (np.abs(raw.dequantize() - values) <= step * 1.001).all()
    with pytest.raises(ValueError, match="matrix"):
        quantize(values[0], WeightFormat.fp8)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"quant_method": "gptq"}, "'gptq'"),
        ({"quant_method": None}, "None"),
        ({"weight_block_size": None}, r"\[128, 128\], not None"),
        ({"weight_block_size": [64, 128]}, r"not \[64, 128\]"),
        ({"fmt": "e5m2"}, "not 'e5m2'"),
    ],
)
def test_other_quantisations_are_refused(change: dict[str, Any], problem: str) -> None:
    check_quantization(FP8)
    with pytest.raises(UnsupportedModelError, match=problem) as caught:
        check_quantization(FP8 | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spelling", [{"quantization_config": FP8}, {"dummy_format": "fp8"}])
def test_dummies_are_quantised_where_checkpoints_are(spelling: dict[str, Any]) -> None:
    config = {
        "model_type": "qwen3_moe",
        "vocab_size": 300,
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_experts": 2,
        "moe_intermediate_size": 150,
        "dtype": "bfloat16",
    }
    dummy = DummyCheckpoint(Path("dummy"), config | spelling, {}, seed=1)
    kept = {name for name in dummy.names() if dummy.info(name).format is not WeightFormat.fp8}
    assert "model.layers.0.mlp.experts.1.down_proj.weight" not in kept
    assert "model.layers.0.self_attn.k_proj.weight" not in kept
    assert {"model.layers.0.mlp.gate.weight", "lm_head.weight", "model.embed_tokens.weight"} < kept
    assert {dummy.info(name).format for name in kept} == {WeightFormat.bf16}
    raw = dummy.get("model.layers.0.mlp.experts.0.gate_proj.weight")
    assert raw.dequantize().std() == pytest.approx(0.02, rel=0.1)
    assert raw.scales is not None
    assert len(np.unique(raw.scales)) == 4
