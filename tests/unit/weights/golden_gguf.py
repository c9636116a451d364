"""The golden checkpoints as GGUF files, the way converters write them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsFile
from tests.model_files import gguf_metadata, gguf_name, write_gguf

__all__ = ["EXPERT_STACKS", "GOLDEN", "golden_config", "write_golden"]

GOLDEN = Path(__file__).parents[2] / "golden"
EXPERT_STACKS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


def golden_config(name: str) -> dict[str, Any]:
    """`config.json` of a golden checkpoint."""
    config: dict[str, Any] = json.loads((GOLDEN / name / "config.json").read_text())
    return config


def write_golden(name: str, path: Path, tokenizer: Mapping[str, Any] | None = None) -> None:
    """Write the checkpoint `name` as one GGUF file, with the metadata of a tokenizer if given."""
    config = golden_config(name)
    source = SafetensorsFile(GOLDEN / name / "model.safetensors")
    tensors: dict[str, RawWeight] = {}
    stacks: dict[str, dict[int, RawWeight]] = {}
    for tensor in source.tensors:
        raw = source.get(tensor)
        layer, _, expert = tensor.partition(".mlp.experts.")
        if expert:
            number, kind = expert.split(".")[:2]
            stack = f"blk.{layer.rpartition('.')[2]}.{EXPERT_STACKS[kind]}.weight"
            stacks.setdefault(stack, {})[int(number)] = raw
        else:
            tensors[gguf_name(tensor)] = _converted(tensor, raw, config)
    for stack, parts in stacks.items():
        shape = (len(parts), *parts[0].shape)
        data = np.concatenate([parts[i].data for i in range(len(parts))])
        tensors[stack] = RawWeight(parts[0].format, shape, data)
    factors = _llama3_factors(config)
    if factors is not None:
        tensors["rope_freqs.weight"] = quantize(factors, WeightFormat.f32)
    write_gguf(path, {**gguf_metadata(config), **(tokenizer or {})}, tensors)


def _converted(name: str, raw: RawWeight, config: dict[str, Any]) -> RawWeight:
    """Vectors as float32; q and k rows of llama models in the order for interleaved rotation."""
    if len(raw.shape) == 1:
        raw = quantize(raw.dequantize(), WeightFormat.f32)
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return raw
    count, rows = config[heads], raw.shape[0]
    halves = raw.data.reshape(count, 2, rows // count // 2, -1)
    data = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(raw.data.shape)
    return RawWeight(raw.format, raw.shape, data)


def _llama3_factors(config: dict[str, Any]) -> np.ndarray[Any, Any] | None:
    """Divisors of the rotary frequencies under `llama3` scaling, one by one as the definition goes."""
    rope = config["rope_parameters"]
    if rope["rope_type"] != "llama3":
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high, original = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (2 * i / head_dim)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1.0 / ((1.0 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)
