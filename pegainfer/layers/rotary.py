"""Rotary position embedding: from the parameters of a checkpoint to the table that the rope op reads.

Knows the frequency formulas; the rotation itself is an op.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["RopeParameters", "RopeType", "RotaryEmbedding", "attention_factor", "cos_sin_table", "inv_freq"]


Array = np.ndarray[Any, np.dtype[np.float32]]


class RopeType(StrEnum):
    """How frequencies are stretched for contexts longer than those of the pre-training."""

    default = "default"
    linear = "linear"
    llama3 = "llama3"
    yarn = "yarn"


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """Checked parameters of the rotation of the first `rotary_dim` dimensions of every head.

    `factor` and `original_max_position_embeddings` belong to the stretched types, the frequency bounds to
    `llama3`, the betas, `truncate` and `attention_factor` (None: by the formula) to `yarn`.
    """

    theta: float
    rotary_dim: int
    type: RopeType = RopeType.default
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None


def inv_freq(rope: RopeParameters) -> Array:
    """Angle per position of each pair of dimensions: float32 `[rotary_dim / 2]`."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    plain = (np.float32(1.0) / np.float32(rope.theta) ** exponents).astype(np.float32)
    if rope.type is RopeType.linear:
        return (plain / np.float32(rope.factor)).astype(np.float32)
    if rope.type is RopeType.llama3:
        return _llama3(rope, plain)
    if rope.type is RopeType.yarn:
        return _yarn(rope, plain)
    return plain


def attention_factor(rope: RopeParameters) -> float:
    """What cosines and sines are multiplied by (1 for every type but YaRN)."""
    if rope.type is not RopeType.yarn:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def cos_sin_table(rope: RopeParameters, max_positions: int) -> Array:
    """float32 `[max_positions, rotary_dim]`: cosines in the first half of a row, sines in the second."""
    half = rope.rotary_dim // 2
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * inv_freq(rope)[None, :]
    table = np.empty((max_positions, rope.rotary_dim), np.float32)
    np.cos(angles, out=table[:, :half])
    np.sin(angles, out=table[:, half:])
    factor = attention_factor(rope)
    if factor != 1.0:
        table *= np.float32(factor)
    return table


class RotaryEmbedding:
    """The table of a model on its device, made when the longest context is known."""

    def __init__(self, device: Device, rope: RopeParameters) -> None:
        self._device = device
        self._rope = rope
        self._table: Tensor | None = None

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that are rotated."""
        return self._rope.rotary_dim

    @property
    def bytes_per_position(self) -> int:
        """Device memory of one row of the table."""
        return self._rope.rotary_dim * DType.float32.itemsize

    def prepare(self, max_positions: int) -> None:
        """Make the table for the positions `[0, max_positions)`."""
        self._table = self._device.from_numpy(cos_sin_table(self._rope, max_positions))

    @property
    def cos_sin(self) -> Tensor:
        """float32 `[max_positions, rotary_dim]`."""
        assert self._table is not None, "prepare() comes before the first step"
        return self._table


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(rope: RopeParameters, plain: Array) -> Array:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    wavelengths = 2.0 * math.pi / plain.astype(np.float64)
    turns = rope.original_max_position_embeddings / wavelengths
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return (plain * ((1.0 - keep) / rope.factor + keep)).astype(np.float32)


def _yarn(rope: RopeParameters, plain: Array) -> Array:
    """Dimensions that turn often in the original context are kept, those that turn rarely divided by the
    factor, with a ramp between.
    """
    dim = rope.rotary_dim

    def dimension_of(turns: float) -> float:
        ratio = rope.original_max_position_embeddings / (turns * 2.0 * math.pi)
        return dim * math.log(ratio) / (2.0 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    stretched: Array = (plain * (ramp / rope.factor + (1.0 - ramp))).astype(np.float32)
    return stretched
