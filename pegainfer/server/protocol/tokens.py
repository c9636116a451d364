"""`POST /tokenize` and `POST /detokenize`: their bodies."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.errors import RequestError
from pegainfer.server.protocol.chat import Chat, read_chat
from pegainfer.server.protocol.fields import Fields
from pegainfer.server.protocol.options import refuse_unbuilt

__all__ = ["DetokenizeRequest", "TokenizeRequest", "parse_detokenize", "parse_tokenize"]


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """A text or a conversation to turn into ids."""

    model: str | None
    source: str | Chat
    add_special_tokens: bool
    return_token_strs: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Ids to turn into text."""

    model: str | None
    tokens: list[int]


def parse_tokenize(body: object) -> TokenizeRequest:
    """Read a body. Raises `RequestError` naming the field that is wrong."""
    fields = Fields(body)
    model, strings = fields.text("model") or None, fields.flag("return_token_strs")
    if fields.has("messages"):
        refuse_unbuilt(fields)
        return TokenizeRequest(model, read_chat(fields), False, strings)
    prompt = fields.text("prompt")
    if prompt is None:
        raise RequestError("either prompt or messages must be given", param="prompt")
    return TokenizeRequest(model, prompt, fields.flag("add_special_tokens", True), strings)


def parse_detokenize(body: object) -> DetokenizeRequest:
    """Read a body. Raises `RequestError` naming the field that is wrong."""
    fields = Fields(body)
    tokens = fields.integers("tokens")
    if tokens is None:
        raise RequestError("tokens is missing", param="tokens")
    return DetokenizeRequest(fields.text("model") or None, list(tokens))
