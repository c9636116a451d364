"""What a user can set right ends the start with one line and exit code 2."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.toy_tokenizer import write_toy

GOLDEN = Path(__file__).parents[1] / "golden" / "llama_smol"
FLAGS = ("--skip-tokenizer-init",)


def start(model: Path | str, *words: str) -> subprocess.CompletedProcess[str]:
    """`pegainfer serve` until it gives up."""
    command = [sys.executable, "-m", "pegainfer", "serve", str(model), "--port", "0", "--device", "cpu"]
    return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=False)


def config(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of config.json."""

    def apply(directory: Path) -> None:
        values = json.loads((directory / "config.json").read_text())
        change(values)
        (directory / "config.json").write_text(json.dumps(values))

    return apply


def header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A change of the safetensors header; the data stays."""

    def apply(directory: Path) -> None:
        file = directory / "model.safetensors"
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        values = json.loads(data[8 : 8 + size])
        change(values)
        text = json.dumps(values).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return apply


def truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def shards(directory: Path) -> None:
    names = {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    (directory / "model.safetensors").rename(directory / "model-00001-of-00002.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


NORM = "model.norm.weight"
UP = "model.layers.0.mlp.up_proj.weight"
CASES: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, "model.safetensors"),
    "missing shard": (shards, "model-00002-of-00002.safetensors"),
    "wrong shape": (header(lambda h: h[NORM].update(shape=[h[NORM]["shape"][0] // 2, 2])), NORM),
    "unknown dtype": (header(lambda h: h[NORM].update(dtype="F7")), "F7"),
    "offsets beyond the file": (header(lambda h: h[NORM].update(data_offsets=[0, 2**60])), NORM),
    "negative offsets": (header(lambda h: h[NORM].update(data_offsets=[-8, 8])), NORM),
    "missing tensor": (header(lambda h: h.pop(NORM)), NORM),
    "lying header length": (
        lambda d: (d / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + b"{}"),
        "model.safetensors",
    ),
    "empty file": (lambda d: (d / "model.safetensors").write_bytes(b""), "model.safetensors"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
    "no config": (lambda d: (d / "config.json").unlink(), "config.json"),
    "config is no JSON": (lambda d: (d / "config.json").write_text("{"), "config.json"),
    "missing field": (config(lambda c: c.pop("hidden_size")), "hidden_size"),
    "field of a wrong type": (config(lambda c: c.update(hidden_size="many")), "hidden_size"),
    "absurd field": (config(lambda c: c.update(num_attention_heads=0)), "num_attention_heads"),
    "unknown architecture": (
        config(lambda c: c.update(architectures=["FooForCausalLM"], model_type="foo")),
        "Qwen3ForCausalLM",
    ),
    "unknown quantisation": (
        config(lambda c: c.update(quantization_config={"quant_method": "awq"})),
        "'awq'",
    ),
    "FP8 without scales": (header(lambda h: h[UP].update(dtype="F8_E4M3", shape=[80, 96])), "_scale_inv"),
}


@pytest.mark.parametrize("name", CASES)
def test_broken_checkpoints(name: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN, directory)
    change, word = CASES[name]
    change(directory)
    check(start(directory, *FLAGS), word)


def test_no_tokenizer(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(GOLDEN, directory)
    check(start(directory), "--skip-tokenizer-init")


def test_a_tokenizer_that_is_none(tmp_path: Path, tiny_model: Path) -> None:
    write_toy(tmp_path)
    shutil.copy(tiny_model / "config.json", tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    check(start(tmp_path, "--load-format", "dummy"), "tokenizer.json")


def test_a_broken_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + b"\xff" * 20)
    check(start(file), "model.gguf")


def test_too_little_memory_is_said_before_loading() -> None:
    done = start(GOLDEN, *FLAGS, "--kv-cache-memory-bytes", "900TiB")
    check(done, "GiB of memory are needed (weights")


def test_a_context_that_the_cache_cannot_hold() -> None:
    check(start(GOLDEN, *FLAGS, "--max-model-len", "64", "--num-gpu-blocks-override", "2"), "--max-model-len")


def test_a_model_that_is_not_there() -> None:
    check(start("./no/such/directory"), "no/such/directory")


def check(done: subprocess.CompletedProcess[str], word: str) -> None:
    """Exit code 2, and one line that has `word` in it."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    errors = [line for line in done.stderr.splitlines() if "error:" in line]
    assert len(errors) == 1, done.stderr
    assert errors[0].startswith("pegainfer: error: ")
    assert word in errors[0], errors[0]
