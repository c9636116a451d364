"""GGUF files: right ones read exactly, wrong ones are one clear error."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pegainfer.errors import PegaInferError, UnsupportedModelError, WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.weights.gguf import GgufFile
from pegainfer.weights.gguf_model import GgufCheckpoint
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsFile
from tests.model_files import GGUF_TYPES, gguf_metadata, gguf_name, write_gguf
from tests.unit.weights.golden_gguf import EXPERT_STACKS, GOLDEN, golden_config, write_golden

Tensors = dict[str, RawWeight]


def random_tensor(*shape: int, format: str = "f32") -> RawWeight:
    return quantize(np.random.default_rng(0).normal(size=shape).astype(np.float32), WeightFormat(format))


def refused(path: Path, error: type[PegaInferError] = WeightsError) -> str:
    with pytest.raises(error) as caught:
        GgufCheckpoint(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("format", [WeightFormat(name) for name in GGUF_TYPES])
def test_tensors_read_as_written(tmp_path: Path, format: WeightFormat) -> None:
    tensors = {"a": random_tensor(3, 64, format=format), "b": random_tensor(2, 5, 32, format=format)}
    write_gguf(tmp_path / "x.gguf", {}, tensors)
    file = GgufFile(tmp_path / "x.gguf")
    for name, raw in tensors.items():
        found = file.tensors[name]
        assert (found.format, found.shape) == (format, raw.shape)
        np.testing.assert_array_equal(file.rows(found), raw.data)


def test_metadata_read_as_written(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "int": 7,
        "negative": -7,
        "float": 0.5,
        "true": True,
        "text": "é👋",
        "strings": ["", "a", "b c", "é"],
        "ints": np.array([1, -2, 3], np.int32),
        "halves": np.array([0.5], np.float64),
        "bools": np.array([True, False]),
        "none": np.array([], np.uint8),
        "no strings": [],
    }
    write_gguf(tmp_path / "x.gguf", values, {})
    found = GgufFile(tmp_path / "x.gguf").metadata
    assert list(found) == list(values)
    for key, value in values.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(found[key], value)
        else:
            assert found[key] == value
            assert type(found[key]) is type(value)


@pytest.mark.parametrize("name", ["llama_smol", "llama3_rope", "qwen2", "qwen3_dense", "qwen3_moe"])
def test_same_weights_and_config_as_the_safetensors_checkpoint(tmp_path: Path, name: str) -> None:
    original = SafetensorsFile(GOLDEN / name / "model.safetensors")
    write_golden(name, tmp_path / "x.gguf")
    checkpoint = GgufCheckpoint(tmp_path / "x.gguf")
    assert set(checkpoint.names()) == set(original.tensors)
    for tensor in original.tensors:
        np.testing.assert_array_equal(checkpoint.get(tensor).dequantize(), original.get(tensor).dequantize())
        assert checkpoint.info(tensor).shape == original.info(tensor).shape
    config = golden_config(name)
    for key in (
        "architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
        "num_experts_per_tok", "moe_intermediate_size",
    ):  # fmt: skip
        assert checkpoint.config.get(key) == config.get(key), key
    assert checkpoint.config["rms_norm_eps"] == pytest.approx(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    assert checkpoint.config["rope_theta"] == rope["rope_theta"]
    scaling = checkpoint.config["rope_scaling"]
    assert (scaling or {}).get("rope_type", "default") == rope["rope_type"]
    if scaling:
        assert {key: pytest.approx(value) for key, value in scaling.items() if key != "rope_type"} == {
            key: rope[key] for key in scaling if key != "rope_type"
        }


def test_reordered_rows_come_back_when_quantised(tmp_path: Path) -> None:
    heads, head_dim, columns = 4, 8, 32
    values = random_tensor(heads * head_dim, columns).dequantize()
    plain = quantize(values, WeightFormat.q4_0)
    shuffled = values.reshape(heads, 2, head_dim // 2, columns).swapaxes(1, 2).reshape(values.shape)
    tensors = minimal_tensors() | {"blk.0.attn_q.weight": quantize(shuffled, WeightFormat.q4_0)}
    write_gguf(tmp_path / "x.gguf", minimal_metadata(), tensors)
    found = GgufCheckpoint(tmp_path / "x.gguf").get("model.layers.0.self_attn.q_proj.weight")
    np.testing.assert_array_equal(found.data, plain.data)


def minimal_metadata(**changes: Any) -> dict[str, Any]:
    config = {
        "model_type": "llama", "num_hidden_layers": 1, "max_position_embeddings": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    }  # fmt: skip
    metadata = gguf_metadata(config) | changes
    return {key: value for key, value in metadata.items() if value is not None}


def minimal_tensors() -> Tensors:
    return {"token_embd.weight": random_tensor(10, 32), "output_norm.weight": random_tensor(32)}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": "gptneox"}, "'gptneox' is not supported; known are llama, qwen2"),
        ({"llama.expert_count": 8}, "llama model with experts"),
    ],
)
def test_unknown_models(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    write_gguf(tmp_path / "x.gguf", minimal_metadata(**changes), minimal_tensors())
    assert problem in refused(tmp_path / "x.gguf", UnsupportedModelError)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"general.architecture": None}, "general.architecture is missing"),
        ({"general.architecture": 3}, "must be a string"),
        ({"general.architecture": ["llama"]}, "must be a string"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": "x"}, "must be a whole number"),
        ({"llama.block_count": -1}, "must be a whole number"),
        ({"llama.attention.head_count": np.array([4, 4], np.int32)}, "must be a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "must be a positive number"),
        ({"llama.attention.value_length": 16}, "different sizes"),
        ({"llama.rope.dimension_count": 4}, "rotation of 4 of 8"),
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": 3}, "must be a string"),
        ({"llama.expert_count": 10**6}, "more than"),
        ({"split.count": 3}, "llama-gguf-split --merge"),
        ({"general.alignment": 3}, "power of two"),
        ({"general.alignment": "x"}, "whole number"),
    ],
)
def test_bad_metadata(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    write_gguf(tmp_path / "x.gguf", minimal_metadata(**changes), minimal_tensors())
    assert problem in refused(tmp_path / "x.gguf")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"blk.0.attn_qkv.weight": random_tensor(4, 32)}, "no tensor 'blk.0.attn_qkv.weight'"),
        ({"blk.0.attn_q.weight": random_tensor(9, 32)}, "9 rows for 4 heads"),
        ({"blk.0.ffn_gate_exps.weight": random_tensor(2, 4, 32)}, "2 experts"),
        ({"rope_freqs.weight": quantize(np.array([1, 3, 2, 5]), WeightFormat.f32)}, "llama3"),
        ({"rope_freqs.weight": random_tensor(5)}, "4 F32 values"),
        ({"rope_freqs.weight": random_tensor(4, format="f16")}, "4 F32 values"),
    ],
)
def test_bad_tensors(tmp_path: Path, changes: Tensors, problem: str) -> None:
    write_gguf(tmp_path / "x.gguf", minimal_metadata(), minimal_tensors() | changes)
    assert problem in refused(tmp_path / "x.gguf")


def test_missing_embedding(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", minimal_metadata(), {})
    assert "'token_embd.weight' is missing" in refused(tmp_path / "x.gguf")


def test_yarn(tmp_path: Path) -> None:
    changes = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32,
        "llama.rope.scaling.yarn_beta_fast": 16.0,
    }
    write_gguf(tmp_path / "x.gguf", minimal_metadata(**changes), minimal_tensors())
    assert GgufCheckpoint(tmp_path / "x.gguf").config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
    }  # fmt: skip


def test_ends_of_an_answer_and_sampling_defaults(tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.tokens": ["a", "<|eot_id|>", "<|im_end|>", "<|endoftext|>", "e"],
        "tokenizer.ggml.token_type": np.array([1, 3, 1, 3, 3], np.int32),
        "tokenizer.ggml.eos_token_id": 4,
        "tokenizer.ggml.bos_token_id": 0,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "general.sampling.top_p": "x",
    }
    write_gguf(tmp_path / "x.gguf", minimal_metadata(**changes), minimal_tensors())
    assert GgufCheckpoint(tmp_path / "x.gguf").generation_config == {
        "temperature": 0.5, "top_k": 20, "eos_token_id": [4, 1, 3], "bos_token_id": 0,
    }  # fmt: skip


def head(num_tensors: int = 0, num_values: int = 0, *, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_values)


def string(text: bytes, *, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def tensor(*dims: int, kind: int = 0, offset: int = 0, name: bytes = b"t") -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"GG", "past the end"),
        (b"GGML" + bytes(100), "not a GGUF file"),
        (head(version=1), "version 1 is not supported"),
        (head(version=0x03000000), "not supported"),
        (head(2**60) + bytes(100), "tensors"),
        (head(0, 2**60) + bytes(100), "metadata entries"),
        (head(0, 1) + string(b"k", length=2**62) + bytes(40), "past the end"),
        (head(0, 1) + string(b"\xff") + bytes(40), "UTF-8"),
        (head(0, 1) + string(b"k") + struct.pack("<I", 99) + bytes(40), "unknown type 99"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 8, 2**60) + bytes(40), "strings"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(40), "past the end"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 4, 2**60) + bytes(40), "values"),
        (head(0, 1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40), "unknown type 9"),
        (head(0, 2) + (string(b"k") + struct.pack("<II", 4, 1)) * 2, "'k' twice"),
        (head(1) + tensor(kind=0) + bytes(64), "0 dimensions"),
        (head(1) + tensor(1, 1, 1, 1, 1) + bytes(64), "5 dimensions"),
        (head(1) + tensor(2**63, 2**63) + bytes(64), "truncated"),
        (head(1) + tensor(0, 2**60) + bytes(64), "empty shape"),
        (head(1) + tensor(4, offset=2**63) + bytes(64), "truncated"),
        (head(1) + tensor(4, offset=8) + bytes(64), "aligned"),
        (head(1) + tensor(33, kind=8) + bytes(64), "blocks of 32"),
        (head(1) + tensor(256, kind=10) + bytes(64), "Q2_K; supported are F32"),
        (head(1) + tensor(288, kind=14) + bytes(640), "288 values, not whole Q6_K blocks of 256"),
        (head(1) + tensor(256, kind=999) + bytes(64), "type 999"),
        (head(2) + tensor(4) * 2 + bytes(128), "'t' twice"),
        (head(2) + tensor(4) + tensor(4, name=b"u") + bytes(128), "overlap"),
    ],
)
def test_damaged_headers(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    assert problem in refused(path)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    body = head(1, version=2) + tensor(4)
    path.write_bytes(body + bytes(-len(body) % 32) + np.arange(4, dtype=np.float32).tobytes())
    file = GgufFile(path)
    assert file.rows(file.tensors["t"]).view(np.float32).tolist() == [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def whole_model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small model with a tokenizer, as one file."""
    from tests.unit.tokenizer.test_gguf_vocabulary import byte_level_metadata

    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    tensors = minimal_tensors() | {"blk.0.attn_q.weight": random_tensor(32, 32, format="q8_0")}
    write_gguf(path, minimal_metadata() | byte_level_metadata(), tensors)
    return path.read_bytes()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6), st.floats(0, 1))
def test_damaged_files_never_escape(
    tmp_path_factory: pytest.TempPathFactory,
    whole_model: bytes,
    flips: list[tuple[float, int]],
    cut: float,
) -> None:
    content = bytearray(whole_model)
    for where, value in flips:
        content[int(where * (len(content) - 1))] = value
    path = tmp_path_factory.mktemp("flip") / "x.gguf"
    path.write_bytes(content[: len(content) if cut > 0.3 else int(len(content) * cut * 3)])
    message = ""
    try:
        checkpoint = GgufCheckpoint(path)
        for name in checkpoint.names():
            with np.errstate(all="ignore"):
                checkpoint.get(name).dequantize()
        tokenizer_from_gguf(checkpoint.metadata, where=path).encode("hello")
    except PegaInferError as error:
        message = str(error)
    assert "\n" not in message


def test_large_vocabularies_parse_fast(tmp_path: Path) -> None:
    tokens = [f"token{i}" for i in range(152_000)]
    merges = [f"to{i} ken" for i in range(151_000)]
    metadata = minimal_metadata() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    write_gguf(tmp_path / "x.gguf", metadata, minimal_tensors())
    start = time.perf_counter()
    found = GgufFile(tmp_path / "x.gguf").metadata
    assert (found["tokenizer.ggml.tokens"], found["tokenizer.ggml.merges"]) == (tokens, merges)
    assert time.perf_counter() - start < 0.5


def test_builtin_model(smollm2: Path) -> None:
    start = time.perf_counter()
    checkpoint = GgufCheckpoint(smollm2)
    assert time.perf_counter() - start < 0.3
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    assert len(checkpoint.names()) == 272
    assert checkpoint.info("model.embed_tokens.weight").format is WeightFormat.q8_0
    assert checkpoint.info("model.layers.29.mlp.down_proj.weight").shape == (576, 1536)
    assert checkpoint.generation_config == {"eos_token_id": [2, 0], "bos_token_id": 1}


def test_names_are_unique() -> None:
    assert len(EXPERT_STACKS) == 3
    assert gguf_name("model.layers.3.mlp.gate.weight") == "blk.3.ffn_gate_inp.weight"


def packed(*fields: tuple[int, int]) -> int:
    """Bit fields `(value, bits)`, the lowest first, as one number."""
    number = shift = 0
    for value, bits in fields:
        number |= value << shift
        shift += bits
    return number


def k_scales(scales: list[int], minima: list[int]) -> bytes:
    """Six-bit scales and minima of eight groups in twelve bytes."""
    low = [packed((scales[i], 6), (scales[i + 4] >> 4, 2)) for i in range(4)]
    middle = [packed((minima[i], 6), (minima[i + 4] >> 4, 2)) for i in range(4)]
    high = [packed((scales[i + 4] & 15, 4), (minima[i + 4] & 15, 4)) for i in range(4)]
    return bytes(low + middle + high)


def encode_block(kind: str, rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """One random block, written field by field, and the values it stands for."""
    halves = struct.pack("<ee", 0.5, 0.25)
    if kind in ("Q5_0", "Q5_1"):
        codes = rng.integers(0, 32, 32)
        high = struct.pack("<I", packed(*((int(code) >> 4, 1) for code in codes)))
        low = bytes(packed((int(codes[i]) & 15, 4), (int(codes[i + 16]) & 15, 4)) for i in range(16))
        if kind == "Q5_0":
            return halves[:2] + high + low, [0.5 * (int(code) - 16) for code in codes]
        return halves + high + low, [0.5 * int(code) + 0.25 for code in codes]
    if kind == "Q6_K":
        codes, scales = rng.integers(0, 64, 256), rng.integers(-128, 128, 16)
        low, high = bytearray(128), bytearray(64)
        for i, code in enumerate(map(int, codes)):
            half, place = divmod(i, 128)
            low[64 * half + place % 64] |= (code & 15) << (4 * (place // 64))
            high[32 * half + place % 32] |= (code >> 4) << (2 * (place // 32))
        body = bytes(low) + bytes(high) + scales.astype(np.int8).tobytes() + struct.pack("<e", 0.5)
        return body, [0.5 * int(scales[i // 16]) * (int(codes[i]) - 32) for i in range(256)]
    bits = 4 if kind == "Q4_K" else 5
    codes = rng.integers(0, 1 << bits, 256)
    scales, minima = rng.integers(0, 64, 8).tolist(), rng.integers(0, 64, 8).tolist()
    low, high = bytearray(128), bytearray(32)
    for i, code in enumerate(map(int, codes)):
        group, place = divmod(i, 32)
        low[32 * (group // 2) + place] |= (code & 15) << (4 * (group % 2))
        high[place] |= (code >> 4) << group
    body = halves + k_scales(scales, minima) + (bytes(high) if bits == 5 else b"") + bytes(low)
    return body, [0.5 * scales[i // 32] * int(codes[i]) - 0.25 * minima[i // 32] for i in range(256)]


@pytest.mark.parametrize(
    ("number", "kind"), [(6, "Q5_0"), (7, "Q5_1"), (12, "Q4_K"), (13, "Q5_K"), (14, "Q6_K")]
)
def test_other_block_types_are_re_encoded(tmp_path: Path, number: int, kind: str) -> None:
    rng = np.random.default_rng(number)
    blocks = [encode_block(kind, rng) for _ in range(8)]
    size = len(blocks[0][1])
    body = head(1) + tensor(2 * size, 4, kind=number)
    path = tmp_path / "x.gguf"
    path.write_bytes(body + bytes(-len(body) % 32) + b"".join(data for data, _ in blocks))
    file = GgufFile(path)
    stored = file.tensors["t"]
    expected = np.array([values for _, values in blocks], np.float32)
    assert stored.type.decode is not None
    raw_blocks = np.frombuffer(b"".join(data for data, _ in blocks), np.uint8).reshape(8, -1)
    np.testing.assert_array_equal(stored.type.decode(raw_blocks), expected)
    rows = RawWeight(stored.format, stored.shape, file.rows(stored))
    assert stored.format is WeightFormat.q8_0
    np.testing.assert_array_equal(rows.data, quantize(expected.reshape(4, -1), WeightFormat.q8_0).data)
    np.testing.assert_array_equal(file.rows(stored, 1, 3), rows.data[1:3])
