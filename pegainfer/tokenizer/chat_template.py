"""Chats as prompts: the model's Jinja template in a sandbox, with the helpers that templates expect.

The sandbox settings, filters and functions are those under which model authors test their templates.
Whatever goes wrong while rendering is the request's fault: a `RequestError` with the template's own message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pegainfer.errors import ConfigError, RequestError
from pegainfer.tokenizer.messages import normalize_messages
from pegainfer.tokenizer.shield import Shield
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "RenderedChat", "read_template"]

_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as the model sees it."""

    text: str
    token_ids: list[int]


class ChatTemplate:
    """The chat template of a served model.

    `override` is a template text that replaces the model's own; `defaults` are variables for every rendering.
    Raises `ConfigError` if `override` is not a template.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        override: str | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sources = {"default": override} if override is not None else tokenizer.chat_templates
        self._defaults = dict(defaults or {})
        if override is not None:
            try:
                _compile(override)
            except jinja2.TemplateError as error:
                raise ConfigError(f"--chat-template is not a valid Jinja template: {error}") from None

    @property
    def is_available(self) -> bool:
        """Whether there is any template."""
        return bool(self._sources)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        parse_special: bool = False,
    ) -> RenderedChat:
        """The prompt of a chat. Raises `RequestError` (400).

        `messages` and `tools` are OpenAI's wire objects as plain data. `variables` are further names for the
        template (`enable_thinking`, ...). With `continue_final_message` the prompt ends inside the last
        message. Text in messages that spells a special token stays text, unless `parse_special`.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message cannot both be true",
                param="continue_final_message",
            )
        names = {**self._defaults, **(variables or {})}
        if wrong := sorted(_RESERVED & names.keys()):
            raise RequestError(
                f"chat_template_kwargs cannot set {', '.join(wrong)}", param="chat_template_kwargs"
            )
        template = self._template(bool(tools))
        shield = Shield(() if parse_special else self._tokenizer.special_tokens)
        chat = normalize_messages(messages, wants_parts=template.wants_parts, takes_text=template.takes_text)
        chat, tools = shield.protect([chat, list(tools) if tools else None])
        end = _mark_end(chat, shield.marker()) if continue_final_message else None
        text = self._run(
            template.compiled,
            {
                **self._tokenizer.named_tokens,
                **names,
                "messages": chat,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
            },
        )
        if end is not None:
            text, found, _ = text.rpartition(end)
            if not found:
                raise RequestError(
                    "continue_final_message is set but the chat template leaves out the final message",
                    param="continue_final_message",
                )
        return RenderedChat(shield.restore(text), shield.encode(text, self._tokenizer))

    def _template(self, with_tools: bool) -> _Compiled:
        name = "tool_use" if with_tools and "tool_use" in self._sources else "default"
        source = self._sources.get(name) or next(iter(self._sources.values()), None)
        if source is None:
            raise RequestError(
                "the model has no chat template; pass --chat-template to the server, or call /v1/completions",
                param="messages",
            )
        try:
            return _compile(source)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template is broken: {error}", param="messages") from None

    @staticmethod
    def _run(template: jinja2.Template, variables: dict[str, Any]) -> str:
        try:
            return template.render(variables)
        except Exception as error:
            # Templates compute with whatever clients send: any exception means that the two do not fit.
            message = str(error) or type(error).__name__
            raise RequestError(f"chat template: {message}", param="messages") from None


def read_template(option: str | None) -> str | None:
    """The text behind `--chat-template`: a file's, or the option itself if it is a template. Raises
    `ConfigError`.
    """
    if option is None:
        return None
    if "{" in option or "\n" in option:
        return option
    try:
        return Path(option).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--chat-template {option}: not a template and not a readable file ({error})"
        ) from None


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A template and how it takes message contents: as lists of parts, as strings, or either."""

    compiled: jinja2.Template
    wants_parts: bool
    takes_text: bool


@lru_cache(maxsize=16)
def _compile(source: str) -> _Compiled:
    environment = _environment()
    tree = environment.parse(source)
    aliases = {
        target.name
        for assign in tree.find_all(nodes.Assign)
        if _is_content(assign.node) and isinstance(target := assign.target, nodes.Name)
    }
    wants_parts = any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )
    tests_text = any(test.name == "string" for test in tree.find_all(nodes.Test))
    return _Compiled(environment.from_string(source), wants_parts, tests_text or not wants_parts)


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is some message's `content`."""
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the model wrote; to a prompt it means nothing."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which models have never seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _mark_end(chat: list[dict[str, Any]], marker: str) -> str:
    """Append `marker` to the last message's text, to find in the rendered text where that ends."""
    last = chat[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + marker
    else:
        texts = [part for part in content or () if isinstance(part.get("text"), str)]
        if not texts:
            raise RequestError(
                "continue_final_message needs a final message with text", param="continue_final_message"
            )
        texts[-1]["text"] += marker
    return marker
