"""`POST /v1/chat/completions`: the body as a `ChatRequest`. Also the chat form of `/tokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegainfer.errors import RequestError
from pegainfer.server.protocol.fields import Fields
from pegainfer.server.protocol.options import GenerationOptions, read_options

__all__ = ["Chat", "ChatRequest", "parse_chat", "read_chat"]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation and how to render it. `variables` are further names for the template."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One call. `prefix` is text that comes before the answer (`echo` of a message that is continued)."""

    options: GenerationOptions
    chat: Chat
    prefix: str
    returns_prompt_logprobs: bool


def parse_chat(body: object, *, model_defaults: Mapping[str, Any], max_logprobs: int) -> ChatRequest:
    """Read a body. Raises `RequestError` naming the field that is wrong."""
    fields = Fields(body)
    chat = read_chat(fields)
    limit = fields.integer("max_completion_tokens")
    older_limit = fields.integer("max_tokens")
    name, max_tokens = ("max_tokens", older_limit) if limit is None else ("max_completion_tokens", limit)
    if max_tokens is not None and max_tokens < 1:
        raise RequestError(f"{name} must be at least 1, got {max_tokens}", param=name)
    prompt_logprobs = fields.integer("prompt_logprobs")
    options = read_options(
        fields,
        model_defaults,
        max_tokens=max_tokens,
        logprobs=_logprobs(fields, max_logprobs),
        prompt_logprobs=prompt_logprobs,
    )
    return ChatRequest(
        options=options,
        chat=chat,
        prefix=_echoed(chat) if fields.flag("echo") else "",
        returns_prompt_logprobs=prompt_logprobs is not None,
    )


def read_chat(fields: Fields) -> Chat:
    """The conversation of a body. What is inside the messages is checked when they are rendered."""
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    if fields.has("chat_template"):
        raise RequestError(
            "chat_template cannot come with a request; it is an option of the server (--chat-template)",
            param="chat_template",
        )
    if fields.flag("add_special_tokens"):
        raise RequestError(
            "add_special_tokens is not supported for chats: the template writes special tokens",
            param="add_special_tokens",
        )
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    for name in ("documents", "reasoning_effort"):
        if fields.has(name):
            variables.setdefault(name, fields.raw(name))
    continues = fields.flag("continue_final_message")
    adds = fields.flag("add_generation_prompt", True)
    if adds and continues:
        raise RequestError(
            "continue_final_message needs add_generation_prompt=false", param="continue_final_message"
        )
    return Chat(messages, adds, continues, variables)


def _logprobs(fields: Fields, limit: int) -> int | None:
    """How many alternatives to report; None: no log-probabilities at all."""
    wanted = fields.flag("logprobs")
    top = fields.integer("top_logprobs")
    if not wanted:
        if top:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        return None
    top = top or 0
    if top < -1 or (limit >= 0 and not 0 <= top <= limit):
        raise RequestError(
            f"top_logprobs must be between 0 and {limit} on this server (--max-logprobs), got {top}",
            param="top_logprobs",
        )
    return top


def _echoed(chat: Chat) -> str:
    """The text of a final assistant message."""
    last = chat.messages[-1]
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return ""
    content = last.get("content")
    return content if isinstance(content, str) else ""
