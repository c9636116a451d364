"""Servers that many tests share: a tiny model with random weights, and the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.servers import Server, serving
from tests.toy_tokenizer import write_toy

VOCAB_SIZE = 264  # what the toy tokenizer has: 256 bytes, 5 merges, 3 control tokens
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "eos_token_id": 263,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the toy tokenizer, for `--load-format dummy` or `--simulate`."""
    directory = tmp_path_factory.mktemp("tiny")
    write_toy(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model, served."""
    log = tmp_path_factory.mktemp("log") / "tiny.log"
    words = (str(tiny_model), "--served-model-name", "tiny", "alias", "--load-format", "dummy")
    with serving(log, *words, "--max-request-bytes", "1MiB") as server:
        yield server


@pytest.fixture(scope="session")
def smol(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, served by its name."""
    log = tmp_path_factory.mktemp("log") / "smol.log"
    with serving(log, "smollm2", "--kv-cache-memory-bytes", "256MiB") as server:
        yield server
