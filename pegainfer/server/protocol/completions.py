"""`POST /v1/completions`: the body as a `CompletionRequest`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegainfer.errors import RequestError
from pegainfer.server.protocol.fields import Fields
from pegainfer.server.protocol.options import MAX_CHOICES, GenerationOptions, read_options

__all__ = ["COMPLETION_DEFAULTS", "CompletionRequest", "parse_completion"]

COMPLETION_DEFAULTS: Mapping[str, Any] = {"max_tokens": 128, "temperature": 0.0, "top_k": 50, "top_p": 1.0}
"""Sampling of this route; these win over what the model's authors chose."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One call. `prompts` are texts or token ids (whose type and range are checked later, with the
    vocabulary). `returns_prompt_logprobs` says that they were asked for by their own name.
    """

    options: GenerationOptions
    prompts: list[str | list[int]]
    add_special_tokens: bool
    echo: bool
    returns_prompt_logprobs: bool


def parse_completion(body: object, *, model_defaults: Mapping[str, Any]) -> CompletionRequest:
    """Read a body. Raises `RequestError` naming the field that is wrong."""
    fields = Fields(body)
    prompts = _prompts(fields.raw("prompt"))
    echo = fields.flag("echo")
    max_tokens = fields.integer("max_tokens")
    if max_tokens == 0 and not echo:
        raise RequestError("max_tokens must be at least 1 unless echo is set", param="max_tokens")
    logprobs = fields.integer("logprobs")
    own = fields.integer("prompt_logprobs")
    options = read_options(
        fields,
        {**model_defaults, **COMPLETION_DEFAULTS},
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=_widest(own, logprobs if echo else None),
    )
    if len(prompts) * options.params.n > MAX_CHOICES:
        raise RequestError(f"a call can have at most {MAX_CHOICES} choices", param="prompt")
    if options.stream and echo and logprobs is not None and options.params.n > 1:
        raise RequestError("echo with logprobs and n above 1 cannot be streamed", param="echo")
    return CompletionRequest(
        options=options,
        prompts=prompts,
        add_special_tokens=fields.flag("add_special_tokens", True),
        echo=echo,
        returns_prompt_logprobs=own is not None,
    )


def _prompts(value: object) -> list[str | list[int]]:
    """The four forms of `prompt` (and their mixture) as a list."""
    if value is None:
        raise RequestError("prompt is missing", param="prompt")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of strings, or token ids", param="prompt")
    if not value:
        raise RequestError("prompt must not be empty", param="prompt")
    if not isinstance(value[0], str | list):
        return [value]
    for item in value:
        if not isinstance(item, str | list):
            raise RequestError(
                f"prompt: every item must be a string or a list of token ids, got {item!r:.40}",
                param="prompt",
            )
    return value


def _widest(*counts: int | None) -> int | None:
    """The request that includes the others; -1 is the whole vocabulary."""
    given = [count for count in counts if count is not None]
    if not given:
        return None
    return min(given) if min(given) < 0 else max(given)
