"""pegainfer: an LLM inference engine in Python with kernels of its own.

The public names are imported on first use, so that `pegainfer --help` does not pay for the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pegainfer.version import __version__

if TYPE_CHECKING:
    from pegainfer.errors import (
        CapacityError,
        ConfigError,
        EngineDeadError,
        KernelError,
        PegaInferError,
        RequestError,
        TokenizerError,
        UnsupportedModelError,
        WeightsError,
    )
    from pegainfer.llm import LLM, CompletionOutput, RequestOutput
    from pegainfer.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "CapacityError",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "KernelError",
    "PegaInferError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "TokenizerError",
    "UnsupportedModelError",
    "WeightsError",
    "__version__",
]

_HOMES = {
    "LLM": "pegainfer.llm",
    "CompletionOutput": "pegainfer.llm",
    "RequestOutput": "pegainfer.llm",
    "SamplingParams": "pegainfer.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pegainfer' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "pegainfer.errors")), name)
    globals()[name] = value
    return value
