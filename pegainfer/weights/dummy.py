"""Random weights from a seed, for tests and benchmarks: norms are 1, biases 0, the rest normal with standard
deviation 0.02.

A tensor depends on seed, name, shape and format only. Values are cut from one pool of random numbers, whose
length shares no factor with usual row sizes, so that the rows of a matrix differ; making them costs little
more than copying them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from pegainfer.errors import ConfigError, WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import FP8_BLOCK, WeightFormat
from pegainfer.weights.checkpoint import TensorInfo
from pegainfer.weights.fp8 import is_projection, scale_shape
from pegainfer.weights.quantized import quantize
from pegainfer.weights.shapes import parameter_shapes

__all__ = ["DummyCheckpoint", "dummy_weight"]

_POOL_BLOCKS = 131_071  # a prime; of 32 values each
_BLOCK = 32
_STD = 0.02
_FP8_SCALE = _STD / 64  # the largest e4m3 number is 7 standard deviations away
_FORMATS = {"float32": WeightFormat.f32, "float16": WeightFormat.f16, "bfloat16": WeightFormat.bf16}


def dummy_weight(name: str, shape: tuple[int, ...], format: WeightFormat, *, seed: int) -> RawWeight:
    """The made-up tensor `name`. Raises `ValueError` if rows are not whole blocks of `format`."""
    if len(shape) == 1:
        value = 0.0 if name.endswith(".bias") else 1.0
        return quantize(np.full(shape, value, np.float32), format)
    rows = math.prod(shape[:-1])
    row_bytes = shape[-1] if format is WeightFormat.fp8 else format.row_bytes(shape[-1])
    pool = _pool(seed, format)
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    number, unit = int.from_bytes(digest, "little"), format.block_bytes
    start = number % (pool.size // unit) * unit
    data = np.empty(rows * row_bytes, np.uint8)
    filled = 0
    while filled < data.size:
        count = min(data.size - filled, pool.size - start)
        data[filled : filled + count] = pool[start : start + count]
        filled, start = filled + count, 0
    scales = _scales(shape, number) if format is WeightFormat.fp8 else None
    return RawWeight(format, shape, data.reshape(rows, row_bytes), scales)


def _scales(shape: tuple[int, ...], seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Scales of the blocks of an fp8 matrix, by row; no two are alike."""
    rng = np.random.Generator(np.random.Philox(seed))
    blocks = _FP8_SCALE * rng.uniform(0.9, 1.1, scale_shape(shape))
    return np.repeat(blocks.astype(np.float32), FP8_BLOCK, axis=0)[: shape[0]]


@lru_cache(maxsize=4)
def _pool(seed: int, format: WeightFormat) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Random values in `format`. A plain pool is one value short of whole blocks: its length is odd."""
    rng = np.random.Generator(np.random.Philox(seed % 2**64))
    values = rng.standard_normal((_POOL_BLOCKS, _BLOCK), np.float32) * np.float32(_STD)
    if format is WeightFormat.fp8:
        data = (values / np.float32(_FP8_SCALE)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8).reshape(-1)
    else:
        data = quantize(values, format).data.reshape(-1)
    return data if format.block_size > 1 else data[: -format.block_bytes]


class DummyCheckpoint:
    """A checkpoint of made-up weights in the shapes of a configuration.

    The format is `dtype`, or for `auto` the configuration's own; the configuration entry `dummy_format` (set
    it with --hf-overrides) asks for another one, such as `q8_0`, for all matrices. `fp8`, or a configuration
    that says that weights are FP8, is for the matrices that such checkpoints quantise.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        generation_config: dict[str, Any],
        *,
        seed: int,
        dtype: str = "auto",
    ) -> None:
        self.path = path
        self.config = dict(config)
        self.generation_config = generation_config
        self._seed = seed
        self._shapes = parameter_shapes(config)
        self._format = _format(config, dtype)
        self._is_fp8 = _asks_for_fp8(config)

    def names(self) -> list[str]:
        return list(self._shapes)

    def info(self, name: str) -> TensorInfo:
        if name not in self._shapes:
            raise WeightsError(f"{self.path}: a model of this configuration has no tensor {name!r}")
        shape = self._shapes[name]
        if self._is_fp8 and is_projection(name):
            return TensorInfo(WeightFormat.fp8, shape)
        plain = len(shape) == 1 or shape[-1] % self._format.block_size
        return TensorInfo(WeightFormat.f32 if plain and self._format.is_quantized else self._format, shape)

    def get(self, name: str) -> RawWeight:
        info = self.info(name)
        return dummy_weight(name, info.shape, info.format, seed=self._seed)

    def close(self) -> None:
        """Nothing is held."""


def _asks_for_fp8(config: Mapping[str, Any]) -> bool:
    quantization = config.get("quantization_config")
    is_fp8 = isinstance(quantization, Mapping) and quantization.get("quant_method") == "fp8"
    return bool(config.get("dummy_format", "fp8" if is_fp8 else None) == "fp8")


def _format(config: Mapping[str, Any], dtype: str) -> WeightFormat:
    chosen = config.get("dummy_format")
    if chosen not in (None, WeightFormat.fp8):
        if chosen not in WeightFormat.__members__:
            raise ConfigError(f"dummy_format must be one of {', '.join(WeightFormat)}, got {chosen!r:.40}")
        return WeightFormat(chosen)
    own = config.get("dtype") or config.get("torch_dtype") or "bfloat16"
    return _FORMATS.get(own if dtype == "auto" else dtype, WeightFormat.bf16)
