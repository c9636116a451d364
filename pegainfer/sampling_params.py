"""What a request asks of sampling and of its own end. Checked here once; nothing downstream re-validates
ranges.

Field names, meanings and ranges are vLLM's. Ids are checked against the vocabulary by the front end, which
knows it.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from pegainfer.errors import RequestError

__all__ = ["GREEDY_TEMPERATURE", "SamplingParams"]

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature the most likely token is taken and top-k, top-p and min-p have no meaning."""

MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1.0 and `min_p` 0.0 switch the filter off.
    `max_tokens` None means up to the context limit. `logprobs` counts the most likely tokens to report
    beside the sampled one (None: report nothing; -1: the whole vocabulary). `stop` strings end the text
    before they appear unless `include_stop_str_in_output`. `seed` makes the result independent of batch
    mates and of the engine's own seed.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        force = msgspec.structs.force_setattr
        stop: Any = self.stop
        force(self, "stop", (stop,) if isinstance(stop, str) else tuple(stop or ()))
        force(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.allowed_token_ids is not None:
            force(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.seed == -1:
            force(self, "seed", None)
        self._check()

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature < GREEDY_TEMPERATURE

    def _check(self) -> None:
        """Raise `RequestError` naming the first field that is out of range."""
        _integer("n", self.n, low=1)
        _number("temperature", self.temperature, low=0.0, high=2.0)
        _integer("top_k", self.top_k, low=-1)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, high=math.inf, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, low=-MAX_SEED - 1, high=MAX_SEED)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=0)
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
                param="min_tokens",
            )
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _integer(name, value, low=-1)
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise RequestError("stop strings must be non-empty strings", param="stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=true", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        for bias in (self.logit_bias or {}).values():
            if math.isnan(bias):
                raise RequestError("logit_bias values must be numbers", param="logit_bias")
        if self.n > 1 and self.is_greedy:
            raise RequestError("n must be 1 when using greedy sampling (temperature 0)", param="n")


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise RequestError(f"{name} must be an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bounds}, got {value}", param=name)


def _number(name: str, value: object, *, low: float, high: float, open_low: bool = False) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or math.isnan(value)
        or math.isinf(value)
    ):
        raise RequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value > high or value < low or (open_low and value == low):
        if math.isinf(high):
            bounds = f"greater than {low}" if open_low else f"at least {low}"
        else:
            bounds = f"in {'(' if open_low else '['}{low}, {high}]"
        raise RequestError(f"{name} must be {bounds}, got {value}", param=name)
