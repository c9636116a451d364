"""Servers that many tests share: a tiny model with random weights, and the built-in model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.weights.gguf import GgufFile
from pegainfer.weights.gguf_model import GgufCheckpoint
from pegainfer.weights.quantized import quantize
from tests.model_files import write_safetensors
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


@pytest.fixture(scope="session")
def smol_cuda(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model, served by its name on a GPU."""
    log = tmp_path_factory.mktemp("log") / "smol_cuda.log"
    with serving(log, "smollm2", "--kv-cache-memory-bytes", "256MiB", device="cuda") as server:
        yield server


@pytest.fixture(scope="session")
def smol_float32(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The built-in model with its numbers written out in float32, on the CPU: nothing is rounded."""
    directory = tmp_path_factory.mktemp("smol_float32")
    checkpoint = GgufCheckpoint(smollm2)
    (directory / "config.json").write_text(json.dumps({**checkpoint.config, "torch_dtype": "float32"}))
    write_safetensors(directory / "model.safetensors", Float32Tensors(checkpoint))
    tokenizer = tokenizer_from_gguf(GgufFile(smollm2).metadata, where=smollm2)
    (directory / "tokenizer.json").write_text(tokenizer.to_json())
    with serving(directory / "log", str(directory), "--kv-cache-memory-bytes", "256MiB") as server:
        yield server


class Float32Tensors(Mapping[str, RawWeight]):
    """Tensors of a checkpoint, widened when they are asked for."""

    def __init__(self, checkpoint: GgufCheckpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> RawWeight:
        return quantize(self._checkpoint.get(name).dequantize(), WeightFormat.f32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.names())

    def __len__(self) -> int:
        return len(self._checkpoint.names())
