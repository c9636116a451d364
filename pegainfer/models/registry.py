"""Which architectures are served, and by which module. A family's module is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

from pegainfer.errors import ConfigError, UnsupportedModelError
from pegainfer.layers.parameters import BuildContext
from pegainfer.models.base import Model
from pegainfer.models.config import ModelConfig

__all__ = ["ModelBuilder", "architecture_of", "known_architectures", "resolve"]

ModelBuilder = Callable[[ModelConfig, BuildContext], Model]
"""The `build` function of a family's module."""

_MODULES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}


def known_architectures() -> tuple[str, ...]:
    """Every architecture name that `resolve` accepts."""
    return tuple(_MODULES)


def architecture_of(values: Mapping[str, Any]) -> str:
    """The architecture that a checkpoint's configuration names; raises `UnsupportedModelError`."""
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"model configuration: architectures must be a list of names, got {names!r:.80}")
    for name in names:
        if name in _MODULES:
            return str(name)
    raise UnsupportedModelError(
        f"architecture {', '.join(names)} is not supported; known: {', '.join(known_architectures())}"
    )


def resolve(architecture: str) -> ModelBuilder:
    """The builder of an architecture; raises `UnsupportedModelError` for an unknown one."""
    module = _MODULES.get(architecture)
    if module is None:
        raise UnsupportedModelError(
            f"architecture {architecture} is not supported; known: {', '.join(known_architectures())}"
        )
    return cast(ModelBuilder, import_module(f"pegainfer.models.{module}").build)
