"""Safetensors files and sharded directories: right ones read exactly, wrong ones are one clear error."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsCheckpoint, SafetensorsFile
from tests.model_files import write_safetensors, write_tensors

GOLDEN = Path(__file__).parents[2] / "golden"


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def tensors(*names: str, columns: int = 4) -> dict[str, RawWeight]:
    values = np.arange(2 * columns, dtype=np.float32).reshape(2, columns)
    return {name: quantize(values + i, WeightFormat.bf16) for i, name in enumerate(names)}


def refused(path: Path) -> str:
    """The message with which a file is refused; it names the file, in one line."""
    with pytest.raises(WeightsError) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_golden_file_reads_as_written() -> None:
    path = GOLDEN / "qwen3_dense" / "model.safetensors"
    file = SafetensorsFile(path)
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    assert set(file.tensors) == set(header)
    for name, stored in header.items():
        low, high = (8 + length + offset for offset in stored["data_offsets"])
        expected = np.frombuffer(content[low:high], ml_dtypes.bfloat16).astype(np.float32)
        raw = file.get(name)
        assert raw.shape == tuple(stored["shape"])
        np.testing.assert_array_equal(raw.dequantize().reshape(-1), expected)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"1234567", "too few"),
        (struct.pack("<Q", 2**63), "not a safetensors file"),
        (struct.pack("<Q", 100_000_001), "not a safetensors file"),
        (struct.pack("<Q", 10) + b"{}", "only 2 follow"),
        (struct.pack("<Q", 2) + b"{x", "not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not valid JSON"),
        (struct.pack("<Q", 15) + b'{"a":1, "a": 2}', "'a' twice"),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert problem in refused(path)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"a": 3}, "not an object"),
        ({"a": {}}, "unknown type None"),
        ({"a": entry(dtype="F33")}, "unknown type 'F33'"),
        ({"a": entry(dtype=[])}, "unknown type"),
        ({"a": entry(shape=[-2])}, "invalid shape"),
        ({"a": entry(shape=[2.0])}, "invalid shape"),
        ({"a": entry(shape=[True, 2])}, "invalid shape"),
        ({"a": entry(shape="2")}, "invalid shape"),
        ({"a": entry(offsets=[0])}, "invalid offsets"),
        ({"a": entry(offsets=[8, 0])}, "invalid offsets"),
        ({"a": entry(offsets=[-8, 0])}, "invalid offsets"),
        ({"a": entry(offsets=[0, 10**30])}, "truncated"),
        ({"a": entry(offsets=[96, 104])}, "truncated"),
        ({"a": entry(shape=[3])}, "needs 12 bytes"),
        ({"a": entry(shape=[10**30, 10**30])}, "needs"),
        ({"a": entry(), "b": entry(offsets=[4, 12])}, "overlap"),
        ({"a": entry(), "b": entry()}, "overlap"),
    ],
)
def test_lying_entries(tmp_path: Path, header: Any, problem: str) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(path, header, [np.zeros(100, np.uint8)])
    assert problem in refused(path)


def test_odd_but_right_shapes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"empty": entry(shape=[0, 4], offsets=[0, 0]), "scalar": entry(shape=[], offsets=[0, 4])}
    write_tensors(path, header, [np.ones(1, np.float32)])
    file = SafetensorsFile(path)
    assert file.get("empty").dequantize().shape == (0, 4)
    assert file.get("scalar").dequantize() == 1.0


def test_other_types_are_refused_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    write_tensors(
        path, {"a": entry(dtype="I64", shape=[1]), "b": entry(offsets=[8, 16])}, [np.zeros(16, np.uint8)]
    )
    file = SafetensorsFile(path)
    assert file.info("b").format is WeightFormat.f32
    with pytest.raises(WeightsError, match="type I64; supported are F32, F16, BF16"):
        file.get("a")


def test_missing_file_is_one_error(tmp_path: Path) -> None:
    assert "cannot be read" in refused(tmp_path / "x.safetensors")


@settings(max_examples=300)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4), st.floats(0, 1))
def test_damaged_files_never_escape(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[float, int]], cut: float
) -> None:
    path = tmp_path_factory.mktemp("flip") / "x.safetensors"
    write_safetensors(path, tensors("a", "b.c"))
    content = bytearray(path.read_bytes())
    for where, value in flips:
        content[int(where * (len(content) - 1))] = value
    path.write_bytes(content[: len(content) if cut > 0.3 else int(len(content) * cut * 3)])
    message = ""
    try:
        file = SafetensorsFile(path)
        for name in file.tensors:
            file.get(name).dequantize()
    except WeightsError as error:
        message = str(error)
    assert "\n" not in message


def write_shards(directory: Path, weight_map: Any) -> None:
    write_safetensors(directory / "one.safetensors", tensors("model.norm.weight", "lm_head.weight"))
    write_safetensors(directory / "two.safetensors", tensors("model.embed_tokens.weight"))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards(tmp_path: Path) -> None:
    weight_map = {"model.embed_tokens.weight": "two.safetensors", "lm_head.weight": "one.safetensors"}
    write_shards(tmp_path, weight_map)
    checkpoint = SafetensorsCheckpoint(tmp_path, {}, {})
    assert checkpoint.names() == ["lm_head.weight", "model.embed_tokens.weight"]
    assert checkpoint.get("lm_head.weight").dequantize()[0, 0] == 1.0
    with pytest.raises(WeightsError, match=r"'model\.norm\.weight' is missing"):
        checkpoint.get("model.norm.weight")


@pytest.mark.parametrize(
    ("weight_map", "problem"),
    [
        ({"a": "three.safetensors"}, "three.safetensors is missing"),
        ({"a": "one.safetensors"}, "'a' of the index is not there"),
        ({"a": "../one.safetensors"}, "not the name of a file"),
        ({"a": "/etc/passwd"}, "not the name of a file"),
        ({"a": ".."}, "not the name of a file"),
        ({"a": ""}, "not the name of a file"),
        ({"a": 3}, "must map"),
        ([1], "must map"),
    ],
)
def test_bad_indexes(tmp_path: Path, weight_map: Any, problem: str) -> None:
    write_shards(tmp_path, weight_map)
    with pytest.raises(WeightsError, match=problem):
        SafetensorsCheckpoint(tmp_path, {}, {})


@pytest.mark.parametrize("text", ["", "[]", "{}", "null"])
def test_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(WeightsError, match="weight_map"):
        SafetensorsCheckpoint(tmp_path, {}, {})


def test_same_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        write_safetensors(tmp_path / name, tensors("x"))
    with pytest.raises(WeightsError, match=r"a\.safetensors and b\.safetensors"):
        SafetensorsCheckpoint(tmp_path, {}, {})


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.language_model.layers.0.a.weight", "model.layers.0.a.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("layers.1.a.weight", "model.layers.1.a.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.visual.x.weight", None),
        ("visual.x.weight", None),
        ("vision_tower.x.weight", None),
        ("mm_projector.x.weight", None),
        ("mtp.layers.0.x.weight", None),
        ("model.layers.2.x.weight", None),
        ("model.layers.1.self_attn.rotary_emb.inv_freq", None),
    ],
)
def test_names_become_one_spelling(tmp_path: Path, stored: str, name: str | None) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors(stored))
    checkpoint = SafetensorsCheckpoint(tmp_path, {"text_config": {"num_hidden_layers": 2}}, {})
    assert checkpoint.names() == ([] if name is None else [name])


def test_two_names_for_one_parameter(tmp_path: Path) -> None:
    both = tensors("model.norm.weight", "norm.weight")
    write_safetensors(tmp_path / "model.safetensors", both)
    with pytest.raises(WeightsError, match="same parameter"):
        SafetensorsCheckpoint(tmp_path, {}, {})


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors("lm_head.weight"))
    checkpoint = SafetensorsCheckpoint(tmp_path, {}, {})
    raw = checkpoint.get("lm_head.weight")
    checkpoint.close()
    del checkpoint
    assert raw.dequantize()[1, 3] == 7.0
