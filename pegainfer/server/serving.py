"""A loaded model, ready to answer: from parsed requests to running `Answers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from pegainfer.config import EngineConfig, ServerOptions
from pegainfer.engine.client import EngineClient
from pegainfer.engine.defaults import sampling_defaults
from pegainfer.engine.inputs import RequestLimits, make_requests
from pegainfer.engine.launch import LaunchedEngine
from pegainfer.engine.messages import AddRequest
from pegainfer.engine.output import OutputProcessor
from pegainfer.errors import RequestError
from pegainfer.sampling_params import SamplingParams
from pegainfer.server.answers import Answers, Choice, Prompt
from pegainfer.server.protocol.chat import Chat, ChatRequest
from pegainfer.server.protocol.completions import CompletionRequest
from pegainfer.server.protocol.errors import not_found
from pegainfer.server.protocol.options import GenerationOptions
from pegainfer.tokenizer.chat_template import ChatTemplate, read_template
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Serving"]

T = TypeVar("T")

_LONG_TEXT = 20_000
"""Texts of more characters are tokenised beside the event loop, which streams in the meantime."""


class Serving:
    """One served model. Raises `ConfigError` if its sampling defaults or chat template cannot be used.

    `asked` is the configuration as the user wrote it.
    """

    def __init__(self, launched: LaunchedEngine, asked: EngineConfig, options: ServerOptions) -> None:
        info = launched.client.info
        self.client: EngineClient = launched.client
        self.tokenizer = launched.tokenizer
        self.names = asked.served_names
        name = asked.model.model
        self.root = name if "/" in name else launched.config.model.model
        self.created = int(time.time())
        self.limits = RequestLimits.of(launched.config, info)
        self.defaults = sampling_defaults(info.generation_config)
        self._template: ChatTemplate | None = None
        if self.tokenizer is not None:
            self._template = ChatTemplate(
                self.tokenizer,
                override=read_template(asked.model.chat_template),
                defaults=options.default_chat_template_kwargs,
            )

    def check_model(self, asked: str | None) -> str:
        """The name of the model that a request asks for. Raises `RequestError` (404)."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            raise not_found(f"The model `{asked}` does not exist.", param="model")
        return asked

    def need_tokenizer(self, param: str) -> Tokenizer:
        """The tokenizer, for the field `param` that needs one. Raises `RequestError`."""
        if self.tokenizer is None:
            raise RequestError(
                "this server runs without a tokenizer (--skip-tokenizer-init): send token ids to "
                "/v1/completions",
                param=param,
            )
        return self.tokenizer

    async def complete(self, request: CompletionRequest, request_id: str) -> Answers:
        """Start the completions of a request. Raises `RequestError`, `EngineDeadError`."""
        prompts = [await self._prompt(prompt, request) for prompt in request.prompts]
        return self._start(prompts, request.options, request_id)

    async def chat(self, request: ChatRequest, request_id: str) -> Answers:
        """Start the answers to a conversation. Raises `RequestError`, `EngineDeadError`."""
        rendered = await self.render(request.chat)
        options = request.options
        prompt = Prompt(None, _truncated(rendered, options, self.limits.max_model_len))
        return self._start([prompt], options, request_id)

    async def render(self, chat: Chat) -> list[int]:
        """Token ids of a conversation. Raises `RequestError`."""
        self.need_tokenizer("messages")
        template = self._template
        assert template is not None
        size = sum(len(str(message)) for message in chat.messages)
        return await _beside_the_loop(
            size,
            lambda: (
                template.render(
                    chat.messages,
                    add_generation_prompt=chat.add_generation_prompt,
                    continue_final_message=chat.continue_final_message,
                    variables=chat.variables,
                ).token_ids
            ),
        )

    async def encode(self, text: str, *, add_special_tokens: bool, can_be_cut: bool = False) -> list[int]:
        """Token ids of a text. Unless it may be cut later, one that is certainly too long for the model is
        refused before any work is done on it.
        """
        tokenizer = self.need_tokenizer("prompt")
        context = self.limits.max_model_len
        least = -(-len(text) // max(tokenizer.max_chars_per_token, 1))
        if least > context and not can_be_cut:
            raise RequestError(
                f"This model's maximum context length is {context} tokens. However, your prompt contains at "
                f"least {least} input tokens. Please reduce the length of the input prompt.",
                param="input_tokens",
            )
        return await _beside_the_loop(
            len(text), lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def _prompt(self, prompt: str | list[int], request: CompletionRequest) -> Prompt:
        options, context = request.options, self.limits.max_model_len
        if isinstance(prompt, str):
            cut = options.truncate_prompt_tokens is not None
            special = request.add_special_tokens
            ids = await self.encode(prompt, add_special_tokens=special, can_be_cut=cut)
            kept = _truncated(ids, options, context)
            if len(kept) == len(ids):
                return Prompt(prompt, ids)
        else:
            kept = _truncated(prompt, options, context)
        if not request.echo or self.tokenizer is None:
            return Prompt(None, kept)
        limit = self.limits.vocab_size
        if any(type(i) is not int or not 0 <= i < limit for i in kept):
            return Prompt(None, kept)  # refused by name when the requests are made
        skip = options.params.skip_special_tokens
        return Prompt(self.tokenizer.decode(kept, skip_special_tokens=skip), kept)

    def _start(self, prompts: Sequence[Prompt], options: GenerationOptions, request_id: str) -> Answers:
        choices: list[Choice] = []
        requests: list[AddRequest] = []
        for prompt in prompts:
            made = make_requests(
                request_id,
                prompt.token_ids,
                self._params(options, len(prompt.token_ids)),
                limits=self.limits,
                priority=options.priority,
                cache_salt=options.cache_salt,
            )
            for index, request in enumerate(made):
                processor = OutputProcessor(request.params, self.tokenizer)
                choices.append(Choice(len(choices), prompt, not index, processor))
            requests += made
        return Answers(self.client.generate(requests), choices, [request.request_id for request in requests])

    def _params(self, options: GenerationOptions, num_prompt: int) -> SamplingParams:
        """With the default limit where none was asked for, as far as there is room for it."""
        params, default = options.params, options.default_max_tokens
        if params.max_tokens is not None or default is None:
            return params
        room = min(self.limits.max_model_len, self.limits.kv_capacity + 1) - num_prompt
        return msgspec.structs.replace(params, max_tokens=min(default, room)) if room > 0 else params


def _truncated(ids: list[int], options: GenerationOptions, context: int) -> list[int]:
    """As much of a prompt as `truncate_prompt_tokens` leaves."""
    size = options.truncate_prompt_tokens
    if size is None:
        return ids
    if size == -1:
        size = max(1, context - (options.params.max_tokens or 1))
    return ids[-size:] if options.truncation_side == "left" else ids[:size]


async def _beside_the_loop(size: int, work: Callable[[], T]) -> T:
    """The result of `work`, which handles `size` characters."""
    return work() if size < _LONG_TEXT else await asyncio.to_thread(work)
