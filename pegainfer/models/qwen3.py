"""Qwen3, dense."""

from __future__ import annotations

from pegainfer.layers.parameters import BuildContext
from pegainfer.models.config import ModelConfig
from pegainfer.models.decoder import Decoder

__all__ = ["build"]


def build(config: ModelConfig, context: BuildContext) -> Decoder:
    """Queries and keys are normalised per head before the rotation."""
    bias = config.attention_bias
    return Decoder(config, context, qkv_bias=bias, output_bias=bias, qk_norm=True)
