"""From a name to a checkpoint and a tokenizer; dummy weights; every way in which a directory can be wrong."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.errors import ConfigError, PegaInferError, TokenizerError, UnsupportedModelError, WeightsError
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.checkpoint import Checkpoint
from pegainfer.weights.dummy import dummy_weight
from pegainfer.weights.loader import load_tokenizer, open_checkpoint, resolve_model
from pegainfer.weights.safetensors import SafetensorsFile
from tests.toy_tokenizer import write_toy
from tests.unit.tokenizer.test_gguf_vocabulary import byte_level_metadata
from tests.unit.weights.golden_gguf import GOLDEN, write_golden


def open_model(path: Path | str, load_format: str = "auto", **options: Any) -> Checkpoint:
    return open_checkpoint(ModelOptions(model=str(path), **options), LoadOptions(load_format=load_format))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy of a golden model directory."""
    return Path(shutil.copytree(GOLDEN / "qwen2", tmp_path / "qwen2"))


def test_directory(directory: Path) -> None:
    checkpoint = open_model(directory)
    assert checkpoint.path == directory
    assert checkpoint.config["model_type"] == "qwen2"
    assert checkpoint.info("model.embed_tokens.weight").shape == (211, 48)


def test_gguf_file_and_directory(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    write_golden("qwen2", directory / "x.gguf")
    assert open_model(directory / "x.gguf").config["model_type"] == "qwen2"
    assert open_model(directory).names() == open_model(directory / "x.gguf").names()
    shutil.copy(directory / "x.gguf", directory / "y.gguf")
    with pytest.raises(WeightsError, match=r"several GGUF files \(x\.gguf, y\.gguf\)"):
        open_model(directory)


def test_format_option_decides_between_both(directory: Path) -> None:
    write_golden("qwen2", directory / "x.gguf")
    assert open_model(directory).path == directory
    assert open_model(directory, "safetensors").path == directory
    assert open_model(directory, "gguf").path == directory / "x.gguf"
    with pytest.raises(WeightsError, match="--load-format safetensors"):
        open_model(directory / "x.gguf", "safetensors")


def test_built_in_name(smollm2: Path) -> None:
    assert resolve_model(ModelOptions(), LoadOptions()) == smollm2
    assert open_model("smollm2").path == smollm2


@pytest.mark.parametrize("name", ["nothing", "/no/such/dir", "./a", "a/b/c", "a b/c", "x.gguf"])
def test_names_that_mean_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"no existing directory or \.gguf file"):
        resolve_model(ModelOptions(model=name), LoadOptions())


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "neither a config.json nor a .gguf file"),
        ({"config.json": "{}"}, "no .safetensors file"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "no .safetensors file"),
        ({"config.json": "{", "model.safetensors": "x"}, "config.json: not valid JSON"),
        ({"config.json": "[]", "model.safetensors": "x"}, "config.json: not a JSON object"),
        (
            {"config.json": "{}", "generation_config.json": "[", "model.safetensors": "x"},
            "generation_config.json",
        ),
        ({"config.json": "{}", "model.safetensors": "x"}, "too few for a header"),
        ({"config.json": "{}", "model.safetensors": ""}, "empty"),
    ],
)
def test_directories_that_cannot_be_opened(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(PegaInferError, match=problem) as caught:
        open_model(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("x")
    with pytest.raises(WeightsError, match="--load-format auto can open"):
        open_model(tmp_path / "model.bin")


def test_overrides_are_merged(directory: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0}
    checkpoint = open_model(directory, hf_overrides={"rope_parameters": rope, "vocab_size": 7, "new": 1})
    assert checkpoint.config["rope_parameters"] == {"rope_theta": 1e6, **rope}
    assert (checkpoint.config["vocab_size"], checkpoint.config["new"]) == (7, 1)


def test_sources_of_sampling_defaults(directory: Path, tmp_path: Path) -> None:
    own = {"temperature": 0.6, "top_k": 20, "eos_token_id": [5, 6]}
    (directory / "generation_config.json").write_text(json.dumps(own))
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 9}')
    assert open_model(directory).generation_config == own
    override = {"temperature": 1.0}
    found = open_model(directory, override_generation_config=override).generation_config
    assert found == own | override
    assert open_model(directory, generation_config="vllm").generation_config == {"eos_token_id": [5, 6]}
    found = open_model(directory, generation_config=str(tmp_path)).generation_config
    assert found == {"top_p": 0.5, "eos_token_id": 9}
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        open_model(directory, generation_config=str(tmp_path / "none"))


@pytest.mark.parametrize("name", ["llama_smol", "llama3_rope", "qwen2", "qwen3_dense", "qwen3_moe"])
def test_dummy_has_the_tensors_of_the_real_model(name: str) -> None:
    real, dummy = open_model(GOLDEN / name), open_model(GOLDEN / name, "dummy")
    assert {n: real.info(n) for n in real.names()} == {n: dummy.info(n) for n in dummy.names()}
    assert dummy.get("model.norm.weight").dequantize().tolist() == [1.0] * real.config["hidden_size"]


def test_dummy_weights_depend_on_seed_and_name_only() -> None:
    def values(name: str, seed: int) -> np.ndarray[Any, Any]:
        return dummy_weight(name, (300, 64), WeightFormat.bf16, seed=seed).dequantize()

    first = values("a", 1)
    np.testing.assert_array_equal(first, values("a", 1))
    assert not np.array_equal(first, values("b", 1))
    assert not np.array_equal(first, values("a", 2))
    assert first.std() == pytest.approx(0.02, rel=0.05)
    assert abs(first.mean()) < 1e-3
    assert len({row.tobytes() for row in first}) == 300


@pytest.mark.parametrize("format", list(WeightFormat))
def test_dummy_formats(format: WeightFormat) -> None:
    raw = dummy_weight("a", (5, 96), format, seed=0)
    assert raw.dequantize().std() == pytest.approx(0.02, rel=0.2)


def test_dummy_options(tmp_path: Path) -> None:
    config = json.loads((GOLDEN / "qwen2" / "config.json").read_text()) | {"hidden_size": 64}
    file = tmp_path / "any-name.json"
    file.write_text(json.dumps(config))
    name = "model.layers.0.mlp.up_proj.weight"
    assert open_model(file, "dummy").info(name).format is WeightFormat.bf16
    assert open_model(file, "dummy", dtype="float32").info(name).format is WeightFormat.f32
    quantised = open_model(file, "dummy", hf_overrides={"dummy_format": "q4_0"})
    assert quantised.info(name).format is WeightFormat.q4_0
    assert quantised.info("model.norm.weight").format is WeightFormat.f32
    assert quantised.info("model.layers.0.mlp.down_proj.weight").format is WeightFormat.f32  # 80 columns
    with pytest.raises(ConfigError, match="dummy_format"):
        open_model(file, "dummy", hf_overrides={"dummy_format": "q3"})
    with pytest.raises(WeightsError, match="no tensor 'x'"):
        quantised.get("x")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"model_type": "gpt2"}, UnsupportedModelError),
        ({"hidden_size": "x"}, ConfigError),
        ({"vocab_size": 0}, ConfigError),
    ],
)
def test_dummy_of_impossible_configurations(change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        open_model(GOLDEN / "qwen2", "dummy", hf_overrides=change)


def test_dummy_weights_are_fast() -> None:
    dummy_weight("warm", (1, 32), WeightFormat.bf16, seed=0)
    start = time.perf_counter()
    raw = dummy_weight("a", (40_000, 1024), WeightFormat.bf16, seed=0)
    assert raw.data.nbytes / (time.perf_counter() - start) > 200e6


def test_dummy_of_a_gguf_file(smollm2: Path) -> None:
    dummy, real = open_model(smollm2, "dummy"), open_model(smollm2)
    assert {n: real.info(n).shape for n in real.names()} == {n: dummy.info(n).shape for n in dummy.names()}


def test_tokenizer_of_a_directory(directory: Path) -> None:
    model = ModelOptions(model=str(directory))
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        load_tokenizer(model, LoadOptions())
    write_toy(directory)
    assert load_tokenizer(model, LoadOptions()).encode("hello") == [259]


def test_tokenizer_of_a_gguf_file(tmp_path: Path, smollm2: Path) -> None:
    assert load_tokenizer(ModelOptions(model=str(smollm2)), LoadOptions()).encode(" is") == [314]
    write_golden("qwen2", tmp_path / "x.gguf", byte_level_metadata())
    assert load_tokenizer(ModelOptions(model=str(tmp_path)), LoadOptions()).encode("hello") == [259]


def test_tokenizer_from_elsewhere(directory: Path, tmp_path: Path) -> None:
    write_toy(tmp_path)
    model = ModelOptions(model=str(directory), tokenizer=str(tmp_path))
    assert load_tokenizer(model, LoadOptions()).encode("hello") == [259]


def test_file_without_a_tokenizer(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    with pytest.raises(TokenizerError, match="--skip-tokenizer-init"):
        load_tokenizer(ModelOptions(model=str(file)), LoadOptions(load_format="dummy"))


def test_loading_reads_files_from_front_to_back(directory: Path) -> None:
    tensors = SafetensorsFile(directory / "model.safetensors").tensors
    starts = [tensors[name].start for name in open_model(directory).names()]
    assert starts == sorted(starts)
