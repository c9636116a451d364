"""A GGUF file as a checkpoint: its tensors under Hugging Face names, its metadata as a Hugging Face config.

Covers the architectures `llama`, `qwen2`, `qwen3` and `qwen3moe`. The `llama` converter reorders the rows of
the query and key projections for interleaved rotation; here they are put back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.errors import UnsupportedModelError, WeightsError
from pegainfer.log import get_logger
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.checkpoint import TensorInfo
from pegainfer.weights.gguf import GgufFile, GgufTensor
from pegainfer.weights.gguf_rope import rope_config

__all__ = ["GgufCheckpoint", "config_from_gguf", "generation_config_from_gguf"]

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture is called in Hugging Face configs."""

    model_type: str
    architecture: str


_FAMILIES = {
    "llama": _Family("llama", "LlamaForCausalLM"),
    "qwen2": _Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": _Family("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_BLOCK_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
# Tokens that end an answer whatever the metadata calls the end of a sequence.
_ENDS = ("<|eot_id|>", "<|im_end|>", "<|endoftext|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
_CONTROL = 3
_MAX_EXPERTS = 1 << 16


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a parameter comes from: a tensor, one expert's slice of it, or rows to put back in order."""

    tensor: GgufTensor
    expert: int | None = None
    heads: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1])


class GgufCheckpoint:
    """The model of a GGUF file. `metadata` also holds the tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.metadata: Mapping[str, Any] = self._file.metadata
        self.config = config_from_gguf(self._file)
        self.generation_config = generation_config_from_gguf(self._file)
        self._sources = _sources(self._file, self.config)
        self._warn_of_recoding()

    def names(self) -> list[str]:
        return list(self._sources)

    def info(self, name: str) -> TensorInfo:
        source = self._find(name)
        return TensorInfo(source.tensor.format, source.shape)

    def get(self, name: str) -> RawWeight:
        source = self._find(name)
        first = (source.expert or 0) * source.num_rows
        data = self._file.rows(source.tensor, first, first + source.num_rows)
        if source.heads is not None:
            data = _restore_rows(data, source.heads, source.shape)
        return RawWeight(source.tensor.format, source.shape, data)

    def close(self) -> None:
        self._sources = {}

    def _warn_of_recoding(self) -> None:
        kinds = {tensor.type for tensor in self._file.tensors.values() if tensor.type.decode is not None}
        if kinds:
            names = ", ".join(sorted(kind.name for kind in kinds))
            logger.warning("%s: %s tensors are re-encoded as Q8_0 while loading", self.path.name, names)

    def _find(self, name: str) -> _Source:
        if name not in self._sources:
            raise WeightsError(f"{self.path}: tensor {name!r} is missing")
        return self._sources[name]


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The Hugging Face config that the metadata amounts to. Raises `UnsupportedModelError` for another
    architecture, `WeightsError` for metadata that are missing or of the wrong type.
    """
    name = file.text("general.architecture")
    if name not in _FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {name!r:.60} is not supported; known are {', '.join(_FAMILIES)}"
        )
    if file.integer("split.count", 0) > 1:
        raise WeightsError(
            f"{file.path}: one part of a split model; merge the parts with `llama-gguf-split --merge` first"
        )
    family = _FAMILIES[name]
    heads = file.integer(f"{name}.attention.head_count")
    hidden_size = file.integer(f"{name}.embedding_length")
    head_dim = file.integer(f"{name}.attention.key_length", hidden_size // max(heads, 1))
    if file.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise WeightsError(f"{file.path}: keys and values of different sizes are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": file.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": file.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.integer(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "torch_dtype": _dtype(file),
        **rope_config(file, name, head_dim),
        **_token_ids(file),
    }
    num_experts = file.integer(f"{name}.expert_count", 0)
    if num_experts > _MAX_EXPERTS:
        raise WeightsError(
            f"{file.path}: metadata {name}.expert_count is {num_experts}, more than {_MAX_EXPERTS}"
        )
    if family.model_type == "qwen3_moe":
        config |= {
            "num_experts": num_experts,
            "num_experts_per_tok": file.integer(f"{name}.expert_used_count"),
            "moe_intermediate_size": file.integer(f"{name}.expert_feed_forward_length"),
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    elif num_experts:
        raise UnsupportedModelError(f"{file.path}: a {name} model with experts is not supported")
    return config


def generation_config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Sampling defaults and every token that ends an answer, under `generation_config.json`'s names."""
    keys = {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "penalty_repeat": "repetition_penalty",
    }
    metadata = file.metadata
    found = {new: metadata.get(f"general.sampling.{old}") for old, new in keys.items()}
    return {key: value for key, value in found.items() if type(value) in (int, float)} | _token_ids(file)


def _token_ids(file: GgufFile) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` (a list), as far as the file names them."""
    metadata = file.metadata
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    kinds, tokens = metadata.get("tokenizer.ggml.token_type"), metadata.get("tokenizer.ggml.tokens")
    if isinstance(kinds, np.ndarray) and isinstance(tokens, list):
        controls = np.flatnonzero(kinds[: len(tokens)] == _CONTROL)
        ends += [int(i) for i in controls if tokens[i] in _ENDS]
    ids: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(i for i in ends if type(i) is int))}
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    return ids | ({"bos_token_id": bos} if type(bos) is int else {})


def _dtype(file: GgufFile) -> str:
    plain = {WeightFormat.f32: "float32", WeightFormat.f16: "float16", WeightFormat.bf16: "bfloat16"}
    formats = {tensor.format for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return plain[formats.pop()] if len(formats) == 1 and formats <= plain.keys() else "bfloat16"


def _sources(file: GgufFile, config: dict[str, Any]) -> dict[str, _Source]:
    """Hugging Face name -> where the tensor is. Refuses tensors whose meaning we do not know."""
    reordered = config["model_type"] == "llama"
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    sources: dict[str, _Source] = {}
    for name, tensor in file.tensors.items():
        match = _BLOCK_NAME.fullmatch(name)
        stem, _, kind = name.rpartition(".")
        if match and match[2] in _EXPERTS and match[3] == "weight" and len(tensor.shape) == 3:
            if tensor.shape[0] != config.get("num_experts"):
                raise WeightsError(f"{file.path}: tensor {name!r} holds {tensor.shape[0]} experts")
            prefix = f"model.layers.{int(match[1])}.mlp.experts"
            for expert in range(tensor.shape[0]):
                sources[f"{prefix}.{expert}.{_EXPERTS[match[2]]}.weight"] = _Source(tensor, expert)
        elif match and match[2] in _BLOCK:
            new = f"model.layers.{int(match[1])}.{_BLOCK[match[2]]}.{match[3]}"
            count = heads.get(match[2]) if reordered else None
            if count is not None and (count < 1 or tensor.shape[0] % (2 * count)):
                raise WeightsError(f"{file.path}: {name!r} has {tensor.shape[0]} rows for {count} heads")
            sources[new] = _Source(tensor, heads=count)
        elif stem in _TOP and kind in ("weight", "bias"):
            sources[f"{_TOP[stem]}.{kind}"] = _Source(tensor)
        elif name != _ROPE_FACTORS:
            raise WeightsError(f"{file.path}: {config['model_type']} models have no tensor {name!r:.80}")
    return sources


def _restore_rows(
    data: np.ndarray[Any, np.dtype[np.uint8]], heads: int, shape: tuple[int, ...]
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """From rows (head, pair, half) to (head, half, pair). Whole rows move, so quantised ones do too."""
    rows = data.reshape(shape[0], -1)
    pairs = rows.reshape(heads, shape[0] // heads // 2, 2, rows.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(data.shape)
