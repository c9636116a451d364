"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from pegainfer.layers.parameters import BuildContext
from pegainfer.models.config import ModelConfig
from pegainfer.models.decoder import Decoder

__all__ = ["build"]


def build(config: ModelConfig, context: BuildContext) -> Decoder:
    """Queries, keys and values always have a bias, the output projection never; no configuration says so."""
    return Decoder(config, context, qkv_bias=True, output_bias=False, qk_norm=False)
