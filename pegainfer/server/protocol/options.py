"""What completions and chats have in common: sampling, streaming, scheduling, and what is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pegainfer.errors import RequestError
from pegainfer.sampling_params import SamplingParams
from pegainfer.server.protocol.fields import Fields

__all__ = ["MAX_CHOICES", "GenerationOptions", "read_options", "refuse_unbuilt"]

MAX_CHOICES = 16_384
"""Most choices (prompts times `n`) of one call."""
_MAX_STOPS = 64
_MAX_STOP_CHARS = 4096
_MAX_BIAS = 100.0

_UNBUILT = (
    *("tools", "functions", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "suffix", "bad_words", "use_beam_search", "prompt_embeds", "audio"),
    *("kv_transfer_params", "repetition_detection", "thinking_token_budget", "vllm_xargs"),
    *("logits_processors", "prediction", "web_search_options"),
)
"""Fields that would change the answer: leaving them out silently would make it a wrong one."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Everything about one call but its prompts.

    `params.max_tokens` None means that none was asked for; then it is `default_max_tokens` or, where that is
    None, or more than there is room for, what is left of the context.
    """

    model: str | None
    params: SamplingParams
    default_max_tokens: int | None
    stream: bool
    include_usage: bool
    usage_in_every_chunk: bool
    priority: int
    cache_salt: str | None
    return_token_ids: bool
    tokens_as_ids: bool
    truncate_prompt_tokens: int | None
    truncation_side: Literal["left", "right"]
    request_id: str | None


def read_options(
    fields: Fields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> GenerationOptions:
    """Read what both routes share; the rest is given.

    `defaults` are sampling parameters of requests that do not set them. Raises `RequestError`.
    """
    refuse_unbuilt(fields)
    asked = {
        "n": fields.integer("n"),
        "temperature": fields.number("temperature"),
        "top_k": fields.integer("top_k"),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "seed": fields.integer("seed"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "logit_bias": _clamped(fields.biases("logit_bias")),
        "allowed_token_ids": fields.integers("allowed_token_ids"),
        "stop": _stops(fields),
        "stop_token_ids": fields.integers("stop_token_ids"),
        "min_tokens": fields.integer("min_tokens"),
    }
    given = {name: value for name, value in asked.items() if value is not None}
    params = SamplingParams(
        **{
            **defaults,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "include_stop_str_in_output": fields.flag("include_stop_str_in_output"),
            "ignore_eos": fields.flag("ignore_eos"),
            "skip_special_tokens": fields.flag("skip_special_tokens", True),
            "spaces_between_special_tokens": fields.flag("spaces_between_special_tokens", True),
        }
    )
    if params.n > MAX_CHOICES:
        raise RequestError(f"n can be at most {MAX_CHOICES}, got {params.n}", param="n")
    stream = fields.flag("stream")
    if stream and fields.has("prompt_logprobs"):
        raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    include_usage, in_every_chunk = _stream_options(fields, stream)
    truncate, side = _truncation(fields)
    return GenerationOptions(
        model=fields.text("model") or None,
        params=params,
        default_max_tokens=defaults.get("max_tokens"),
        stream=stream,
        include_usage=include_usage,
        usage_in_every_chunk=in_every_chunk,
        priority=fields.integer("priority") or 0,
        cache_salt=_cache_salt(fields),
        return_token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
        truncate_prompt_tokens=truncate,
        truncation_side=side,
        request_id=fields.text("request_id") or None,
    )


def refuse_unbuilt(fields: Fields) -> None:
    """Raise `RequestError` for a field that asks for something that this server cannot do."""
    _check_tools(fields)
    for name in _UNBUILT:
        if fields.raw(name):  # an empty value asks for nothing
            raise RequestError(f"{name} is not supported by this server", param=name)
    best_of = fields.integer("best_of")
    if best_of is not None and best_of > 1:
        raise RequestError("best_of above 1 is not supported by this server", param="best_of")
    wanted = fields.mapping("response_format")
    if wanted is not None and wanted.get("type") != "text":
        raise RequestError(
            f"response_format of type {wanted.get('type')!r:.40} is not supported here, only 'text'",
            param="response_format",
        )


def _check_tools(fields: Fields) -> None:
    if fields.raw("tools") == []:
        raise RequestError("tools must not be an empty list; leave it out", param="tools")
    choice = fields.raw("tool_choice")
    if choice not in (None, "none") and not fields.has("tools"):
        raise RequestError("tool_choice needs tools", param="tool_choice")


def _clamped(biases: dict[int, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    return {token_id: min(max(bias, -_MAX_BIAS), _MAX_BIAS) for token_id, bias in biases.items()}


def _stops(fields: Fields) -> tuple[str, ...]:
    """Stop strings, few and short enough that watching for them costs nothing."""
    stops = fields.texts("stop")
    if len(stops) > _MAX_STOPS or any(len(stop) > _MAX_STOP_CHARS for stop in stops):
        raise RequestError(
            f"stop takes at most {_MAX_STOPS} strings of at most {_MAX_STOP_CHARS} characters", param="stop"
        )
    return stops


def _stream_options(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Whether usage comes at the end, and whether with every chunk."""
    options = fields.mapping("stream_options")
    if options is None:
        return False, False
    if not stream:
        raise RequestError("stream_options needs stream=true", param="stream_options")
    inner = Fields(options)
    try:
        include_usage = inner.flag("include_usage")
        return include_usage, include_usage and inner.flag("continuous_usage_stats")
    except RequestError as error:
        raise RequestError(f"stream_options.{error.message}", param="stream_options") from None


def _truncation(fields: Fields) -> tuple[int | None, Literal["left", "right"]]:
    size = fields.integer("truncate_prompt_tokens")
    if size is not None and size < 1 and size != -1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {size}",
            param="truncate_prompt_tokens",
        )
    match fields.text("truncation_side"):
        case None | "left":
            return size, "left"
        case "right":
            return size, "right"
    raise RequestError("truncation_side must be 'left' or 'right'", param="truncation_side")


def _cache_salt(fields: Fields) -> str | None:
    salt = fields.text("cache_salt")
    if salt == "":
        raise RequestError("cache_salt must not be empty", param="cache_salt")
    return salt
