"""Qwen3 with routed experts."""

from __future__ import annotations

from pegainfer.errors import ConfigError
from pegainfer.layers.mlp import FeedForward
from pegainfer.layers.moe import MoeSizes, RoutedExperts
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.parameters import BuildContext
from pegainfer.models.config import ModelConfig
from pegainfer.models.decoder import Decoder, dense_feed_forward

__all__ = ["build"]


def build(config: ModelConfig, context: BuildContext) -> Decoder:
    """Qwen3's attention; the feed-forward of most layers is a softmax router over experts."""
    if config.moe is None:
        raise ConfigError(f"model configuration: {config.architecture} needs the field num_experts")
    bias = config.attention_bias
    return Decoder(config, context, qkv_bias=bias, output_bias=bias, qk_norm=True, feed_forward=_feed_forward)


def _feed_forward(
    context: BuildContext, config: ModelConfig, layer: int, name: str, norm: RmsNorm
) -> FeedForward:
    moe = config.moe
    if moe is None or layer not in moe.layers:
        return dense_feed_forward(context, config, layer, name, norm)
    sizes = MoeSizes(
        hidden_size=config.hidden_size,
        intermediate_size=moe.intermediate_size,
        num_experts=moe.num_experts,
        top_k=moe.num_experts_per_tok,
        renormalize=moe.norm_topk_prob,
    )
    return RoutedExperts(context, name, sizes, norm=norm)
