"""Rotary settings of a GGUF file as Hugging Face's `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.gguf import GgufFile

__all__ = ["rope_config"]

# What every published model with `llama3` scaling uses; the file keeps only the factors that result.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR = 1.0, 4.0
_ORIGINAL_LENGTHS = tuple(1 << bits for bits in (13, *range(4, 13), *range(14, 21)))


def rope_config(file: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` (None without scaling). Raises `WeightsError` for settings that cannot
    be expressed.
    """
    theta = file.number(f"{architecture}.rope.freq_base", 10000.0)
    rotary_dim = file.integer(f"{architecture}.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise WeightsError(f"{file.path}: rotation of {rotary_dim} of {head_dim} dimensions is not supported")
    scaling = _scaling(file, f"{architecture}.rope.scaling.")
    if "rope_freqs.weight" in file.tensors:
        if scaling is not None:
            raise WeightsError(f"{file.path}: rope_freqs.weight together with rope.scaling is not supported")
        scaling = _from_factors(file, theta, head_dim)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _scaling(file: GgufFile, prefix: str) -> dict[str, Any] | None:
    kind = file.text(f"{prefix}type", "none")
    if kind == "none":
        return None
    factor = file.number(f"{prefix}factor", 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise WeightsError(f"{file.path}: rope scaling {kind!r:.40} is not supported, only linear and yarn")
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    if f"{prefix}original_context_length" in file.metadata:
        scaling["original_max_position_embeddings"] = file.integer(f"{prefix}original_context_length")
    for key in ("beta_fast", "beta_slow"):
        if f"{prefix}yarn_{key}" in file.metadata:
            scaling[key] = file.number(f"{prefix}yarn_{key}")
    extra = file.number(f"{prefix}attn_factor", 1.0)
    if extra != 1.0 and factor > 1.0:
        scaling["attention_factor"] = extra * (0.1 * math.log(factor) + 1.0)
    return scaling


def _from_factors(file: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """The `llama3` scaling whose divisors of the frequencies the tensor holds."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.format is not WeightFormat.f32 or tensor.shape != (head_dim // 2,):
        raise WeightsError(f"{file.path}: rope_freqs.weight must hold {head_dim // 2} F32 values")
    factors = file.rows(tensor).view(np.float32)[0].astype(np.float64)
    factor = float(factors.max(initial=1.0))
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi)  # per position
    for original in _ORIGINAL_LENGTHS:
        share = np.clip(
            (original * turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR), 0.0, 1.0
        )
        if np.allclose(factors, 1.0 / ((1.0 - share) / factor + share), rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW_FREQ_FACTOR,
                "high_freq_factor": _HIGH_FREQ_FACTOR,
                "original_max_position_embeddings": original,
            }
    raise WeightsError(
        f"{file.path}: the rotary factors in rope_freqs.weight are not those of `llama3` scaling; "
        "use the safetensors checkpoint of this model"
    )
