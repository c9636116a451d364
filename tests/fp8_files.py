"""FP8 checkpoints for tests, made of other ones or of random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.fp8 import is_projection
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsFile
from tests.model_files import write_safetensors

__all__ = ["FP8", "fp8_copy", "write_fp8"]

Array = np.ndarray[Any, Any]

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


def write_fp8(directory: Path, config: Mapping[str, Any], weights: Mapping[str, Array]) -> dict[str, Array]:
    """A directory whose projections are FP8, the rest bfloat16; what its tensors mean, by name."""
    tensors = {
        name: quantize(values, WeightFormat.fp8 if is_projection(name) else WeightFormat.bf16)
        for name, values in weights.items()
    }
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(directory / "model.safetensors", tensors)
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": FP8}))
    return {name: raw.dequantize() for name, raw in tensors.items()}


def fp8_copy(source: Path, directory: Path) -> dict[str, Array]:
    """An unquantised model of one file with its projections in FP8."""
    file = SafetensorsFile(source / "model.safetensors")
    weights = {name: file.get(name).dequantize() for name in file.tensors}
    return write_fp8(directory, json.loads((source / "config.json").read_text()), weights)
