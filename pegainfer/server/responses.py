"""Whole responses as JSON objects, from answers that are complete. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.engine.messages import FinishReason
from pegainfer.engine.output import Collector, Usage
from pegainfer.server.answers import Choice
from pegainfer.server.protocol.chat import ChatRequest
from pegainfer.server.protocol.completions import CompletionRequest
from pegainfer.server.protocol.logprobs import (
    CompletionLogprobs,
    TokenNames,
    chat_logprobs,
    joined,
    prompt_logprobs,
)
from pegainfer.version import __version__

__all__ = ["ResponseHead", "chat_response", "completion_response", "finish_name", "usage_json"]

_FINGERPRINT = f"pegainfer-{__version__}"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What all parts of one response share. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str


def completion_response(
    head: ResponseHead,
    request: CompletionRequest,
    outputs: Sequence[tuple[Choice, Collector]],
    usage: Usage,
    *,
    names: TokenNames,
) -> dict[str, Any]:
    """The body of `/v1/completions`. `outputs` are in the order of their indexes."""
    first: Collector | None = None
    choices = []
    for choice, output in outputs:
        first = output if choice.is_first or first is None else first
        choices.append(_completion_choice(request, choice, output, first, names))
    return {
        **_head(head, "text_completion"),
        "choices": choices,
        "usage": usage_json(usage),
        "system_fingerprint": _FINGERPRINT,
    }


def chat_response(
    head: ResponseHead,
    request: ChatRequest,
    outputs: Sequence[tuple[Choice, Collector]],
    usage: Usage,
    *,
    names: TokenNames,
) -> dict[str, Any]:
    """The body of `/v1/chat/completions`."""
    choices = []
    for choice, output in outputs:
        wire: dict[str, Any] = {
            "index": choice.index,
            "message": {"role": "assistant", "content": request.prefix + output.text},
            "logprobs": None if output.logprobs is None else chat_logprobs(names, output.logprobs),
            "finish_reason": finish_name(output.finish_reason),
            "stop_reason": output.stop_reason,
        }
        if request.options.return_token_ids:
            wire["token_ids"] = output.token_ids
        choices.append(wire)
    body = {
        **_head(head, "chat.completion"),
        "choices": choices,
        "usage": usage_json(usage),
        "system_fingerprint": _FINGERPRINT,
    }
    first_choice, first_output = outputs[0]
    if request.returns_prompt_logprobs:
        body["prompt_logprobs"] = prompt_logprobs(names.tokenizer, first_output.prompt_logprobs or ())
    if request.options.return_token_ids:
        body["prompt_token_ids"] = first_choice.prompt.token_ids
    return body


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as clients read them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def finish_name(reason: FinishReason | None) -> str | None:
    """The finish reason of an answer that ended in good order."""
    return None if reason is None else reason.value


def _head(head: ResponseHead, kind: str) -> dict[str, Any]:
    return {"id": head.id, "object": kind, "created": head.created, "model": head.model}


def _completion_choice(
    request: CompletionRequest, choice: Choice, output: Collector, first: Collector, names: TokenNames
) -> dict[str, Any]:
    """`first` is the output of the prompt's first choice, which alone has scored the prompt."""
    options, prompt = request.options, choice.prompt
    parts = []
    if options.params.logprobs is not None:
        writer = CompletionLogprobs(names, skip_special_tokens=options.params.skip_special_tokens)
        if request.echo:
            parts += [writer.start(prompt.token_ids[0]), writer.add(first.prompt_logprobs or ())]
        parts.append(writer.add(output.logprobs or ()))
    wire: dict[str, Any] = {
        "index": choice.index,
        "text": (prompt.text or "") + output.text if request.echo else output.text,
        "logprobs": joined(parts) if parts else None,
        "finish_reason": finish_name(output.finish_reason),
        "stop_reason": output.stop_reason,
    }
    if request.returns_prompt_logprobs:
        wire["prompt_logprobs"] = prompt_logprobs(names.tokenizer, first.prompt_logprobs or ())
    if options.return_token_ids:
        wire["token_ids"] = output.token_ids
        wire["prompt_token_ids"] = prompt.token_ids
    return wire
