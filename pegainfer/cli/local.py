"""A model in this process, for the commands that write to a terminal."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from pegainfer.cli.arguments import engine_values
from pegainfer.cli.sampling import SamplingOptions
from pegainfer.llm import LLM
from pegainfer.log import setup_logging
from pegainfer.sampling_params import SamplingParams
from pegainfer.tokenizer.chat_template import ChatTemplate, read_template

__all__ = ["LocalModel", "local_model"]


class LocalModel:
    """Answers and completions as they come, with the model's sampling defaults where `params` had none."""

    def __init__(self, llm: LLM, params: SamplingParams, *, chat_template: str | None) -> None:
        self._llm = llm
        self._params = params
        self._template = ChatTemplate(llm.get_tokenizer(), override=read_template(chat_template))
        self.name = llm.info.model_name

    def stream(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The pieces of the answer to a conversation."""
        return self._pieces(self._template.render(messages).token_ids)

    def complete(self, prompt: str) -> Iterator[str]:
        """The pieces of what follows `prompt`."""
        return self._pieces(prompt)

    def _pieces(self, prompt: str | list[int]) -> Iterator[str]:
        for delta in self._llm.stream(prompt, self._params):
            yield delta.text


@contextmanager
def local_model(namespace: argparse.Namespace, sampling: SamplingOptions) -> Iterator[LocalModel]:
    """The model that a command line describes, until the block ends. Only warnings are logged unless
    `PEGAINFER_LOG_LEVEL` says otherwise. Raises `PegaInferError`.
    """
    setup_logging(default_level="WARNING")
    values: dict[str, Any] = engine_values(namespace)
    with LLM(**values) as llm:
        defaults = llm.get_default_sampling_params()
        # Until the context ends, unless a length was asked for.
        params = msgspec.structs.replace(defaults, **{"max_tokens": None, **sampling.given()})
        yield LocalModel(llm, params, chat_template=values.get("chat_template"))
