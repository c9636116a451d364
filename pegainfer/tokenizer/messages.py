"""Chat messages from the wire in the shape that templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pegainfer.errors import RequestError

__all__ = ["normalize_messages"]

_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], *, wants_parts: bool, takes_text: bool
) -> list[dict[str, Any]]:
    """Copies of `messages` with contents as the template takes them, tool-call arguments as objects, and the
    reasoning of assistants under both of its names. Raises `RequestError` naming the message.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages must be a list with at least one message", param="messages")
    return [
        _normalize(message, f"messages[{i}]", wants_parts, takes_text) for i, message in enumerate(messages)
    ]


def _normalize(message: Any, where: str, wants_parts: bool, takes_text: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object", param="messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where}.role must be a string", param="messages")
    result = {key: value for key, value in message.items() if value is not None or key == "content"}
    parts = _parts(message.get("content"), where)
    if isinstance(parts, str):
        result["content"] = parts if takes_text else [{"type": "text", "text": parts}]
    else:
        result["content"] = parts if wants_parts else "\n".join(part["text"] for part in parts)
    reasoning = result.get("reasoning", result.get("reasoning_content"))
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(result["tool_calls"], where)
    return result


def _parts(content: Any, where: str) -> str | list[dict[str, str]]:
    """The content as one string, or as text parts if it came in parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise RequestError(f"{where}.content must be a string or a list of parts", param="messages")
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind not in _TEXT_TYPES:
            raise RequestError(
                f"{where}.content[{index}]: parts of type {kind!r:.60} are not supported, only text",
                param="messages",
            )
        text = part if isinstance(part, str) else part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise RequestError(f"{where}.content[{index}].text must be a string", param="messages")
        parts.append({"type": "text", "text": text})
    return parts


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments are objects: templates turn them into JSON themselves."""
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where}.tool_calls must be a list", param="messages")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RequestError(f"{where}.tool_calls[{index}].function must be an object", param="messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except (ValueError, RecursionError):
                raise RequestError(
                    f"{where}.tool_calls[{index}].function.arguments is not valid JSON", param="messages"
                ) from None
        result.append({**call, "function": {**function, "arguments": arguments or {}}})
    return result
