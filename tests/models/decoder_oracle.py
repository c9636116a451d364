"""An oracle of the llama and Qwen decoders in float64, from the equations, one sequence at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def decoder_logits(
    config: dict[str, Any], weights: dict[str, Array], ids: list[int], *, dtype: Any = np.float64
) -> Array:
    """Logits `[len(ids), vocab_size]` of a checkpoint given as arrays under its own names."""

    def weight(name: str) -> Array:
        return weights[name].astype(dtype)

    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    eps, count = config["rms_norm_eps"], len(ids)
    turn = rotation(config, size, count).astype(np.complex128 if dtype == np.float64 else np.complex64)
    future = np.triu(np.full((count, count), -np.inf), 1).astype(dtype)

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight(f"{name}.weight")

    def project(x: Array, name: str) -> Array:
        y = x @ weight(f"{name}.weight").T
        return y + weight(f"{name}.bias") if f"{name}.bias" in weights else y

    def rotate(x: Array) -> Array:
        pairs = x[..., : size // 2] + 1j * x[..., size // 2 :]
        pairs = pairs * turn[:, None, :]
        return np.concatenate([pairs.real, pairs.imag], -1).astype(dtype)

    def gated(x: Array, name: str) -> Array:
        gate = project(x, f"{name}.gate_proj")
        return project(gate / (1 + np.exp(-gate)) * project(x, f"{name}.up_proj"), f"{name}.down_proj")

    def routed(x: Array, name: str) -> Array:
        scores = softmax(project(x, f"{name}.gate"))
        out = np.zeros_like(x)
        for row in range(count):
            best = sorted(range(len(scores[row])), key=lambda e: (-scores[row, e], e))
            best = best[: config["num_experts_per_tok"]]
            total = scores[row, best].sum() if config["norm_topk_prob"] else 1.0
            for expert in best:
                out[row] += scores[row, expert] / total * gated(x[row], f"{name}.experts.{expert}")
        return out

    x = weight("model.embed_tokens.weight")[ids]
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}"
        h = norm(x, f"{name}.input_layernorm")
        q, k, v = (
            project(h, f"{name}.self_attn.{part}_proj").reshape(count, -1, size) for part in ("q", "k", "v")
        )
        if f"{name}.self_attn.q_norm.weight" in weights:
            q, k = norm(q, f"{name}.self_attn.q_norm"), norm(k, f"{name}.self_attn.k_norm")
        q, k = rotate(q), rotate(k)
        mixed = [
            softmax(q[:, head] @ k[:, head * kv_heads // heads].T / math.sqrt(size) + future)
            @ v[:, head * kv_heads // heads]
            for head in range(heads)
        ]
        x = x + project(np.concatenate(mixed, -1), f"{name}.self_attn.o_proj")
        h = norm(x, f"{name}.post_attention_layernorm")
        is_routed = f"{name}.mlp.gate.weight" in weights
        x = x + (routed(h, f"{name}.mlp") if is_routed else gated(h, f"{name}.mlp"))
    head = "model.embed_tokens" if config.get("tie_word_embeddings") else "lm_head"
    return norm(x, "model.norm") @ weight(f"{head}.weight").T


def softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    shifted = x.astype(np.float64) - x.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def rotation(config: dict[str, Any], size: int, count: int) -> Array:
    """`exp(i angle)` of every position and pair, times the attention factor: complex `[count, size / 2]`."""
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config["rope_theta"],
    }
    theta = rope["rope_theta"]
    speeds = [theta ** (-2 * pair / size) for pair in range(size // 2)]
    factor = 1.0
    if rope.get("rope_type") == "yarn":
        scale, trained = rope["factor"], rope["original_max_position_embeddings"]

        def pair_with(turns: float) -> float:
            """The pair that turns so many times within the trained context."""
            return size / 2 * math.log(trained / (2 * math.pi * turns)) / math.log(theta)

        first = max(math.floor(pair_with(rope.get("beta_fast", 32))), 0)
        last = min(math.ceil(pair_with(rope.get("beta_slow", 1))), size - 1)
        share = [min(max((pair - first) / (last - first), 0.0), 1.0) for pair in range(size // 2)]
        speeds = [
            speed * (1 - part) + speed / scale * part for speed, part in zip(speeds, share, strict=True)
        ]
        factor = rope.get("attention_factor") or 0.1 * math.log(scale) + 1
    else:
        assert rope.get("rope_type", "default") == "default"
    return factor * np.exp(1j * np.arange(count)[:, None] * np.array(speeds)[None, :])
