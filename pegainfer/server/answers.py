"""`Answers`: the choices of one call while the engine works on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pegainfer.engine.client import Generation
from pegainfer.engine.messages import FinishReason
from pegainfer.engine.output import OutputDelta, OutputProcessor, Usage
from pegainfer.server.protocol.errors import unavailable

__all__ = ["Answers", "Choice", "News", "Prompt"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it came (None: as ids) and as ids. `text` is what an echo repeats."""

    text: str | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to one prompt. `is_first` of its prompt's: the one whose prompt counts in the usage."""

    index: int
    prompt: Prompt
    is_first: bool
    processor: OutputProcessor


News = list[tuple[Choice, OutputDelta]]


class Answers:
    """Iterate over it: every item is what has happened since the last one, at most one delta per choice.

    It ends when all choices have. The failure of any choice fails the call: it raises `RequestError`, or
    `EngineDeadError`. Whoever stops early calls `close`. A cancelled wait loses nothing.
    """

    __slots__ = ("_by_id", "_generation", "choices")

    def __init__(self, generation: Generation, choices: Sequence[Choice], request_ids: Sequence[str]) -> None:
        self._generation = generation
        self._by_id = dict(zip(request_ids, choices, strict=True))
        self.choices = choices

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> News:
        news: News = []
        for update in await self._generation.__anext__():
            choice = self._by_id[update.request_id]
            delta = choice.processor.push(update)
            if delta.ends_early:
                self._generation.end(update.request_id, FinishReason.stop)
            if delta.error is not None:
                raise delta.error
            if delta.finish_reason is FinishReason.abort:
                raise unavailable("the server stopped before the answer was complete")
            news.append((choice, delta))
        return news

    def close(self) -> None:
        """Stop whatever still runs. Idempotent."""
        self._generation.close()

    def usage(self) -> Usage:
        """Token counts so far: every prompt once, the tokens of all choices."""
        usage = Usage()
        for choice in self.choices:
            usage.completion_tokens += choice.processor.num_tokens
            if choice.is_first:
                usage.prompt_tokens += len(choice.prompt.token_ids)
                usage.cached_tokens += choice.processor.num_cached_tokens
        return usage
