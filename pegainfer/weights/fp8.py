"""FP8 matrices of Hugging Face checkpoints: e4m3 numbers in `X.weight`, in `X.weight_scale_inv` a factor for
each block of 128 x 128 of them. Despite its name the factor is multiplied by.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.errors import UnsupportedModelError, WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import FP8_BLOCK, WeightFormat

__all__ = ["SCALE_SUFFIX", "check_quantization", "fp8_weight", "is_projection", "scale_shape"]

SCALE_SUFFIX = "_scale_inv"
"""Behind the name of a matrix: the name of its factors."""


def is_projection(name: str) -> bool:
    """Whether FP8 checkpoints usually quantise the tensor: routers, embeddings and heads they leave alone."""
    return name.startswith("model.layers.") and name.endswith("_proj.weight")


def check_quantization(section: Mapping[str, Any]) -> None:
    """Raise `UnsupportedModelError` unless `quantization_config` describes FP8 in blocks of 128 x 128.

    Which matrices are quantised is not asked of it but of the tensors: lists of exceptions are often wrong.
    """
    method, block = section.get("quant_method"), section.get("weight_block_size")
    if method != "fp8":
        raise UnsupportedModelError(
            f"model configuration: weights quantised by {method!r:.60} are not supported; "
            "use an unquantised, an FP8 or a GGUF checkpoint"
        )
    if block != [FP8_BLOCK, FP8_BLOCK]:
        raise UnsupportedModelError(
            f"model configuration: FP8 weights are supported with weight_block_size "
            f"[{FP8_BLOCK}, {FP8_BLOCK}], not {block!r:.60}"
        )
    numbers = section.get("fmt", "e4m3")
    if numbers != "e4m3":
        raise UnsupportedModelError(
            f"model configuration: FP8 weights are supported in format e4m3, not {numbers!r:.60}"
        )


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Blocks of a matrix; those at the edges may be cut."""
    rows, columns = shape
    return -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)


def fp8_weight(
    shape: tuple[int, ...], numbers: np.ndarray[Any, np.dtype[np.uint8]], scales: RawWeight, *, name: str
) -> RawWeight:
    """The matrix `name` of its numbers, uint8 `[rows, columns]`, and its factors of `scale_shape(shape)`.
    Raises `WeightsError` for a factor that is not finite.
    """
    factors = scales.dequantize()
    if not np.isfinite(factors).all():
        raise WeightsError(f"tensor {name}{SCALE_SUFFIX} has factors that are not finite")
    by_row = np.repeat(factors, FP8_BLOCK, axis=0)[: shape[0]]
    return RawWeight(WeightFormat.fp8, shape, numbers, by_row)
