"""Names and shapes of all tensors of a model, from its configuration alone: for weights that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.errors import ConfigError, UnsupportedModelError

__all__ = ["parameter_shapes"]

_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Canonical tensor name -> shape. Raises `UnsupportedModelError` for another family, `ConfigError` for a
    missing or impossible size.
    """
    kind = config.get("model_type")
    if kind not in _FAMILIES:
        raise UnsupportedModelError(
            f"dummy weights of model type {kind!r:.60} are not supported; known are {', '.join(_FAMILIES)}"
        )
    hidden = _size(config, "hidden_size")
    vocab = _size(config, "vocab_size")
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(_size(config, "num_hidden_layers")):
        parts = _attention(config, kind, hidden) | _mlp(config, kind, layer, hidden)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention(config: Mapping[str, Any], kind: str, hidden: int) -> dict[str, tuple[int, ...]]:
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    head_dim = _size(config, "head_dim", hidden // heads)
    rows = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, heads * head_dim),
    }
    for name, count in rows.items():
        shapes[f"self_attn.{name}.weight"] = (count, hidden)
        if kind == "qwen2" or config.get("attention_bias"):
            shapes[f"self_attn.{name}.bias"] = (count,)
    if config.get("attention_bias") and kind != "qwen2":
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if kind in ("qwen3", "qwen3_moe"):
        shapes |= {"self_attn.q_norm.weight": (head_dim,), "self_attn.k_norm.weight": (head_dim,)}
    return shapes


def _mlp(config: Mapping[str, Any], kind: str, layer: int, hidden: int) -> dict[str, tuple[int, ...]]:
    experts = config.get("num_experts", config.get("num_local_experts")) or 0
    dense_layers = config.get("mlp_only_layers") or ()
    step = _size(config, "decoder_sparse_step", 1)
    if kind != "qwen3_moe" or not experts or layer in dense_layers or (layer + 1) % step:
        shapes = _gated("mlp", hidden, _size(config, "intermediate_size"))
        if config.get("mlp_bias"):
            shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
        return shapes
    size = _size(config, "moe_intermediate_size")
    shapes = {"mlp.gate.weight": (experts, hidden)}
    for expert in range(experts):
        shapes |= _gated(f"mlp.experts.{expert}", hidden, size)
    return shapes


def _gated(prefix: str, hidden: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (size, hidden),
        f"{prefix}.up_proj.weight": (size, hidden),
        f"{prefix}.down_proj.weight": (hidden, size),
    }


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"the configuration's {key} must be a positive integer, got {value!r:.60}")
    return value
