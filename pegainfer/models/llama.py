"""The Llama family: Llama 2 and 3.x, SmolLM2 and everything else of that shape."""

from __future__ import annotations

from pegainfer.layers.parameters import BuildContext
from pegainfer.models.config import ModelConfig
from pegainfer.models.decoder import Decoder

__all__ = ["build"]


def build(config: ModelConfig, context: BuildContext) -> Decoder:
    """A plain decoder; `attention_bias` covers all four projections."""
    bias = config.attention_bias
    return Decoder(config, context, qkv_bias=bias, output_bias=bias, qk_norm=False)
