"""`scripts/make-model`: what it writes opens, with the shapes asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.loader import load_tokenizer, open_checkpoint
from pegainfer.weights.shapes import parameter_shapes
from tests.unit.weights.golden_gguf import golden_config

SCRIPT = Path(__file__).parents[3] / "scripts" / "make-model"
VOCAB = 49_160


def make_model(tmp_path: Path, family: str, out: str, *options: str) -> subprocess.CompletedProcess[str]:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "vocab_size": VOCAB}
    config = tmp_path / "in.json"
    config.write_text(json.dumps(golden_config(family) | sizes))
    command = [sys.executable, str(SCRIPT), str(config), str(tmp_path / out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize(
    ("family", "out", "format"),
    [
        ("qwen3_dense", "x.gguf", "q4_0"),
        ("qwen3_moe", "x.gguf", "q8_0"),
        ("qwen2", "x", "bf16"),
        ("qwen3_dense", "x", "fp8"),
    ],
)
def test_models_open(tmp_path: Path, family: str, out: str, format: str) -> None:
    done = make_model(tmp_path, family, out, "--format", format)
    assert (done.returncode, done.stderr) == (0, "")
    model = ModelOptions(model=str(tmp_path / out))
    checkpoint = open_checkpoint(model, LoadOptions())
    shapes = parameter_shapes(json.loads((tmp_path / "in.json").read_text()))
    assert {name: checkpoint.info(name).shape for name in checkpoint.names()} == shapes
    embedding = checkpoint.get("model.embed_tokens.weight")
    projection = checkpoint.info("model.layers.0.self_attn.q_proj.weight").format
    assert projection is WeightFormat(format)
    assert embedding.format is (WeightFormat.bf16 if format == "fp8" else projection)
    assert embedding.dequantize().std() == pytest.approx(0.02, rel=0.1)
    tokenizer = load_tokenizer(model, LoadOptions())
    assert tokenizer.encode("The capital") == [504, 3575]
    assert tokenizer.decodable_vocab_size == VOCAB - 8
    assert tokenizer.eos_token_id == 2
    assert "default" in tokenizer.chat_templates


@pytest.mark.usefixtures("smollm2")
@pytest.mark.parametrize("out", ["x.gguf", "x"])
def test_mistakes_are_one_line(tmp_path: Path, out: str) -> None:
    done = make_model(tmp_path, "qwen2", out, "--format", "q8_0", "--tokenizer", str(tmp_path / "none.gguf"))
    assert done.returncode == 2
    assert done.stderr.startswith("make-model: ")
    assert done.stderr.count("\n") == 1
