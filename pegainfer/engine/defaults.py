"""Sampling defaults that a model's authors chose (`generation_config.json`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pegainfer.errors import ConfigError, RequestError
from pegainfer.log import get_logger
from pegainfer.sampling_params import SamplingParams

__all__ = ["sampling_defaults"]

logger = get_logger(__name__)

_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `SamplingParams` that `generation_config` sets, for requests that do not.

    `EngineInfo.generation_config` is the one that the options chose. Raises `ConfigError` for a value that no
    request could ask for. What was taken is logged.
    """
    taken = {
        field: value for key, field in _FIELDS.items() if (value := generation_config.get(key)) is not None
    }
    try:
        SamplingParams(**{**taken, "min_tokens": 0})
    except RequestError as error:
        raise ConfigError(
            f"generation_config: {error}; correct it with --override-generation-config, or pass "
            "--generation-config vllm"
        ) from None
    if taken:
        listed = ", ".join(f"{field}={value}" for field, value in taken.items())
        logger.info(
            "Default sampling parameters come from the model's generation config: %s "
            "(--generation-config vllm turns this off)",
            listed,
        )
    return taken
