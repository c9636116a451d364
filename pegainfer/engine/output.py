"""Text output of one engine request: ids to text, stop strings, log-probabilities, the reason of the end. No
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pegainfer.engine.messages import FinishReason, RequestUpdate
from pegainfer.engine.stop_strings import StopStrings
from pegainfer.errors import RequestError
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.tokenizer.detokenizer import Detokenizer
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Collector", "OutputDelta", "OutputProcessor", "Usage"]


@dataclass(slots=True)
class Usage:
    """Token counts of one response: each prompt once, the tokens of all its choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What an update adds to an output.

    `logprobs` has one entry per token of `token_ids` where they were asked for. `text` may lag behind the
    tokens: incomplete characters and possible stop strings are withheld until they are certain. The last
    delta has a `finish_reason`; with `error` its text is worthless. `stop_reason` is the stop string or the
    listed token id that ended the output, None for the end-of-sequence token.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: RequestError | None = None
    ends_early: bool = False
    """The text has ended while the engine still works on the request: abort it there."""


class OutputProcessor:
    """Turns the updates of one engine request into deltas. Without a tokenizer there is no text.

    The result is the same however the engine's tokens are spread over updates. Updates after the end are
    ignored.
    """

    __slots__ = (
        "_detokenizer",
        "_finished",
        "_min_tokens",
        "_stops",
        "_with_stop_token",
        "last_update",
        "num_cached_tokens",
        "num_tokens",
    )

    def __init__(self, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        elif params.stop:
            raise RequestError(
                "stop strings need a tokenizer; this server runs without one, use stop_token_ids",
                param="stop",
            )
        include = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop, include_in_output=include) if params.stop else None
        self._with_stop_token = include
        self._min_tokens = params.min_tokens
        self._finished = False
        self.num_tokens = 0
        """Tokens of the output so far, the one that ended it included."""
        self.num_cached_tokens = 0
        """Prompt tokens that were found in the prefix cache, known from the first token on."""
        self.last_update: RequestUpdate | None = None
        """The update that ended the request, with its times."""

    def push(self, update: RequestUpdate) -> OutputDelta:
        """What `update` adds."""
        if self._finished:
            return OutputDelta()
        reason = update.finish_reason
        self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        text, used, stop = self._text_of(update.token_ids, ends_with_stop=reason is FinishReason.stop)
        self.num_tokens += used
        logprobs = update.logprobs
        if stop is not None:
            self._finished = True
            self.last_update = update
            return OutputDelta(
                text,
                update.token_ids[:used],
                None if logprobs is None else logprobs[:used],
                update.prompt_logprobs,
                FinishReason.stop,
                stop,
                ends_early=reason is None,
            )
        if reason is None:
            return OutputDelta(text, update.token_ids, logprobs, update.prompt_logprobs)
        self._finished = True
        self.last_update = update
        if self._stops is not None:
            text += self._stops.flush()
        return OutputDelta(
            text,
            update.token_ids,
            logprobs,
            update.prompt_logprobs,
            reason,
            update.stop_reason,
            error=_error(update) if reason is FinishReason.error else None,
        )

    def _text_of(self, token_ids: list[int], *, ends_with_stop: bool) -> tuple[str, int, str | None]:
        """Certain text of new tokens, how many of them count, and the stop string that ended the text.

        A token that ends the output is not text unless stop strings are part of it, too.
        """
        count = len(token_ids)
        if self._detokenizer is None:
            return "", count, None
        spoken = count - 1 if ends_with_stop and not self._with_stop_token else count
        if self._stops is None:
            return self._detokenizer.push(token_ids[:spoken]), count, None
        pieces: list[str] = []
        for index in range(spoken):
            piece = self._detokenizer.push(token_ids[index : index + 1])
            if self.num_tokens + index < self._min_tokens:
                pieces.append(piece)
                continue
            piece, stop = self._stops.push(piece)
            pieces.append(piece)
            if stop is not None:
                return "".join(pieces), index + 1, stop
        return "".join(pieces), count, None


class Collector:
    """A whole output, put together from its deltas."""

    __slots__ = (
        "_pieces",
        "error",
        "finish_reason",
        "logprobs",
        "prompt_logprobs",
        "stop_reason",
        "token_ids",
    )

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: RequestError | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._pieces)

    @property
    def cumulative_logprob(self) -> float | None:
        """Sum over the tokens, where log-probabilities were asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)

    def add(self, delta: OutputDelta) -> None:
        """Append a delta."""
        if delta.text:
            self._pieces.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = self.prompt_logprobs or []
            self.prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.error = delta.error


def _error(update: RequestUpdate) -> RequestError:
    """The failure that the engine reported, as the server would have raised it."""
    kind = {400: "BadRequestError", 503: "ServiceUnavailableError"}.get(
        update.error_status, "InternalServerError"
    )
    return RequestError(
        update.error or "the request failed", param=update.error_param, status=update.error_status, kind=kind
    )
