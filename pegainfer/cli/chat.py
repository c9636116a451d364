"""`pegainfer chat`: a conversation in the terminal, with a model in this process or a running server's."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TextIO

from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.cli.sampling import SamplingOptions
from pegainfer.config import option
from pegainfer.errors import PegaInferError

__all__ = ["ChatModel", "Conversation", "run"]

_HELP = """/help   this text
/reset  forget the conversation
/exit   leave (or Ctrl-D)
Ctrl-C stops an answer."""


class ChatModel(Protocol):
    """Who answers."""

    @property
    def name(self) -> str: ...

    def stream(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The pieces of the answer to the last message; raises `PegaInferError`."""
        ...


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """With whom, and how it begins."""

    url: str | None = option(None, "Talk with a running server, e.g. http://127.0.0.1:8000.")
    system_prompt: str | None = option(None, "System message in front of the conversation.")
    quick: str | None = option(None, "Ask this one question and leave.", metavar="TEXT")


def run(arguments: list[str]) -> int:
    """Talk until the end of the input."""
    parser = ArgumentParser(
        "chat",
        "Talk with a model in the terminal. /help lists the commands of the conversation.",
        examples=(
            "pegainfer chat smollm2",
            'pegainfer chat smollm2 --temperature 0.2 --system-prompt "You answer in one sentence."',
            "pegainfer chat --url http://127.0.0.1:8000",
            'pegainfer chat smollm2 --quick "What is the capital of France?"',
        ),
    )
    parser.add_model()
    parser.add_options(ChatOptions, "Chat")
    parser.add_options(SamplingOptions, "Sampling")
    parser.add_engine_options()
    namespace = parser.parse(arguments)
    options, sampling = make(ChatOptions, namespace), make(SamplingOptions, namespace)
    opened: AbstractContextManager[ChatModel]
    if options.url is not None:
        from pegainfer.cli.remote import RemoteChat

        model = getattr(namespace, "model", None)
        opened = contextlib.nullcontext(RemoteChat(options.url, model=model, sampling=sampling.given()))
    else:
        from pegainfer.cli.local import local_model

        opened = local_model(namespace, sampling)
    with opened as chat_model:
        conversation = Conversation(chat_model, system_prompt=options.system_prompt, out=sys.stdout)
        if options.quick is not None:
            return 0 if conversation.say(options.quick) else 2
        return _talk(conversation, chat_model.name)


class Conversation:
    """The messages so far. Answers are written to `out` as they come."""

    def __init__(self, model: ChatModel, *, system_prompt: str | None, out: TextIO) -> None:
        self._model = model
        self._out = out
        self._start = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self.messages: list[dict[str, str]] = list(self._start)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._start)

    def say(self, text: str) -> bool:
        """Send one message and write the answer. Ctrl-C keeps what came until then; a message that was
        refused is forgotten, and False returned.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._model.stream(self.messages):
                pieces.append(piece)
                self._out.write(piece)
                self._out.flush()
        except KeyboardInterrupt:
            self._out.write(" [stopped]")
        except PegaInferError as error:
            self.messages.pop()
            self._out.flush()
            print(f"pegainfer: error: {error}", file=sys.stderr)
            return False
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self._out.write("\n")
        self._out.flush()
        return True


def _talk(conversation: Conversation, name: str) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print(f"{name}. /help lists commands.")
    while True:
        try:
            text = input("> " if is_terminal else "").strip()
        except EOFError:
            return 0
        if text == "/exit":
            return 0
        if text == "/reset":
            conversation.reset()
            print("The conversation is forgotten.")
        elif text == "/help":
            print(_HELP)
        elif text.startswith("/") and len(text.split()) == 1:
            print(f"There is no command {text}; /help lists them.")
        elif text:
            conversation.say(text)
