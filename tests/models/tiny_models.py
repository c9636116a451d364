"""Small models with random weights, and a larger one of a real shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.weights.shapes import parameter_shapes
from tests.models.worker_driver import MemoryCheckpoint

YARN_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 193,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 4.0,
    },
    "tie_word_embeddings": False,
}


def random_weights(config: dict[str, Any], seed: int, *, head_scale: float = 1.0) -> dict[str, Any]:
    """Weights at a scale at which attention and every norm matter."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Any] = {}
    for name, shape in parameter_shapes(config).items():
        if len(shape) == 1:
            weights[name] = rng.normal(0.0 if name.endswith("bias") else 1.0, 0.3, shape).astype(np.float32)
        else:
            scale = head_scale if name.startswith(("lm_head", "model.embed")) else 1.2
            weights[name] = (rng.standard_normal(shape, np.float32) * scale / shape[1] ** 0.5).astype(
                np.float32
            )
    return weights


QWEN3_SHAPE: dict[str, Any] = {
    **YARN_CONFIG,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}

VOCAB = 521
CONFIG: dict[str, Any] = {
    **QWEN3_SHAPE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}


MOE_CONFIG: dict[str, Any] = {
    **CONFIG,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}


def checkpoint(seed: int = 3, **options: Any) -> MemoryCheckpoint:
    return MemoryCheckpoint(CONFIG, random_weights(CONFIG, seed, head_scale=4.0), **options)
