"""Kernels that GPU providers ask for, found by binding and launching on a GPU that is only described."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.config import EngineConfig
from pegainfer.kernels import load_providers
from pegainfer.kernels.artifacts import PlannedGpu, needed_kernels
from pegainfer.ops.op import Case, all_ops
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.weights.dummy import DummyCheckpoint
from pegainfer.worker.build import bind_ops

__all__ = ["MODELS", "launch_case", "sources_of_cases", "sources_of_model"]

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}

MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728},
    "Qwen3-4B-FP8": {
        **_QWEN3,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    },
    "Qwen3-30B-A3B": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        **_QWEN3,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "SmolLM2-135M in float32": {
        **_QWEN3,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "dtype": "float32",
    },
}


def sources_of_model(name: str, arch: str) -> list[KernelSource]:
    """What one of `MODELS` (cut to one layer) loads on a GPU of `arch` when it is built."""
    config = EngineConfig.from_flat(load_format="dummy")
    checkpoint = DummyCheckpoint(Path(name), MODELS[name], {}, seed=0)
    return needed_kernels(arch, lambda device: bind_ops(config, checkpoint, device=device))


def launch_case(gpu: PlannedGpu, case: Case[Any], launcher: Any) -> None:
    """Launch with tensors of the case's shapes, which checks the arguments of every kernel."""
    described = gpu.empty((1,), DType.uint8)
    launcher(
        **{
            name: gpu.from_numpy(value)
            if isinstance(value, np.ndarray)
            else described
            if hasattr(value, "for_device")
            else value
            for name, value in case.arguments.items()
        }
    )


def sources_of_cases(arch: str) -> list[KernelSource]:
    """What the providers load for all parity cases. A provider that loads a kernel at a launch fails: what is
    wrong with a kernel must show when the model is built.
    """
    load_providers(DeviceKind.cuda)
    sources: dict[KernelSource, None] = {}
    for op in all_ops().values():
        for case in op.cases(np.random.default_rng(0)):
            for provider in op.providers:
                gpu = PlannedGpu(arch)
                launcher = provider.factory(case.facts, gpu) if provider.kind is gpu.kind else None
                if launcher is not None:
                    bound = len(gpu.sources)
                    launch_case(gpu, case, launcher)
                    late = list(gpu.sources)[bound:]
                    assert not late, f"{op.name} loads {late} at its first launch"
                sources |= gpu.sources
    return list(sources)
