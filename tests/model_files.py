"""Writers of model files for tests and for `scripts/make-model`: safetensors directories and GGUF files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import FP8_BLOCK, WeightFormat

__all__ = ["GGUF_TYPES", "gguf_metadata", "gguf_name", "write_gguf", "write_safetensors", "write_tensors"]

GGUF_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q8_0": 8, "bf16": 30}
_SAFETENSORS_TYPES = {
    WeightFormat.f32: "F32",
    WeightFormat.f16: "F16",
    WeightFormat.bf16: "BF16",
    WeightFormat.fp8: "F8_E4M3",
}
_SCALARS = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}
_ALIGNMENT = 32
_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}


def write_safetensors(path: Path, tensors: Mapping[str, RawWeight]) -> None:
    """One safetensors file. Values may be made on demand; each is asked for twice. An fp8 matrix becomes two
    tensors: its numbers, and a float32 factor for each of its blocks (`<name>_scale_inv`).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        nonlocal offset
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + nbytes]}
        offset += nbytes

    for name, raw in tensors.items():
        add(name, _SAFETENSORS_TYPES[raw.format], raw.shape, raw.data.nbytes)
        if raw.scales is not None:
            blocks = raw.scales[::FP8_BLOCK]
            add(f"{name}_scale_inv", "F32", blocks.shape, blocks.nbytes)

    def chunks() -> Iterator[Any]:
        for raw in tensors.values():
            yield raw.data
            if raw.scales is not None:
                yield raw.scales[::FP8_BLOCK]

    write_tensors(path, header, chunks())


def write_tensors(path: Path, header: Any, chunks: Any = ()) -> None:
    """A safetensors file with any header, right or wrong, and then the bytes of `chunks`."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for chunk in chunks:
            out.write(memoryview(np.ascontiguousarray(chunk)).cast("B"))


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, RawWeight]) -> None:
    """A GGUF file, version 3. Values of `tensors` may be made on demand; each is asked for twice."""
    directory, offset = bytearray(), 0
    for name, raw in tensors.items():
        directory += _string(name) + struct.pack("<I", len(raw.shape))
        directory += struct.pack(f"<{len(raw.shape)}Q", *reversed(raw.shape))
        directory += struct.pack("<IQ", GGUF_TYPES[raw.format], offset)
        offset += -(-raw.data.nbytes // _ALIGNMENT) * _ALIGNMENT
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(_string(key) + _typed(value) for key, value in metadata.items()) + bytes(directory)
    with path.open("wb") as out:
        out.write(head)
        for raw in tensors.values():
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            out.write(memoryview(np.ascontiguousarray(raw.data)).cast("B"))
        out.write(b"\0" * (-out.tell() % _ALIGNMENT))


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor with the Hugging Face name `name` (not of an expert's)."""
    stem, _, kind = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{_NAMES[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a Hugging Face configuration, without a tokenizer."""
    name = _ARCHITECTURES[config["model_type"]]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    values = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config.get("num_key_value_heads", heads),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": head_dim,
    }
    if name == "qwen3moe":
        values["expert_count"] = config.get("num_experts", config.get("num_local_experts"))
        values["expert_used_count"] = config["num_experts_per_tok"]
        values["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return {"general.architecture": name} | {f"{name}.{key}": value for key, value in values.items()}


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    """A metadata value with its type in front: 32-bit numbers, 64-bit where they do not fit."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value) if 0 <= value < 2**32 else struct.pack("<Iq", 11, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case np.ndarray():
            kind = _SCALARS[value.dtype.str[1:]]
            return struct.pack("<IIQ", 9, kind, value.size) + value.tobytes()
        case list():
            return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    raise TypeError(f"no GGUF type for {type(value).__name__}")
