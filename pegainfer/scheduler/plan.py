"""The step contract: what the scheduler asks of a worker (`StepPlan`), what comes back (`StepOutput`), and
what that means to the requests (`RequestUpdate`).

Plain data without arrays, so that a plan can be broadcast to ranks. A step computes `num_tokens` tokens of
each touched request, starting at `num_computed_tokens`: prefill, decode, a prefix hit and a chunk of a
prompt are the same thing.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pegainfer.sampling_params import SamplingParams

__all__ = [
    "FinishReason",
    "NewRequest",
    "RequestUpdate",
    "SampledToken",
    "ScheduledRequest",
    "StepOutput",
    "StepPlan",
    "TokenLogprobs",
]


class NewRequest(msgspec.Struct, frozen=True):
    """A request that the worker has not seen, or has forgotten after a preemption.

    `token_ids` are the prompt and, after a preemption, the tokens generated so far; the first
    `num_prompt_tokens` are the prompt. `seed` is always set: the request's own or one that the engine drew.
    `stop_token_ids` is every id that `min_tokens` must hold back.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    stop_token_ids: tuple[int, ...] = ()


class ScheduledRequest(msgspec.Struct, frozen=True):
    """What one request computes in a step.

    Tokens `[num_computed_tokens, num_computed_tokens + num_tokens)` are computed; `new_block_ids` are
    appended to the request's block table first (for a new or resumed request: the whole table). `samples`
    says that the last of them yields a next token. A token that was sampled in a step whose output the
    scheduler has not seen yet is known to the worker only; it is the last of the request's tokens there.
    """

    request_id: str
    num_tokens: int
    num_computed_tokens: int
    new_block_ids: list[int]
    samples: bool


class StepPlan(msgspec.Struct, frozen=True):
    """One step. The order of `scheduled` is the order of rows. `released` are forgotten before anything
    else.
    """

    step_id: int
    new_requests: list[NewRequest]
    scheduled: list[ScheduledRequest]
    released: list[str]

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(entry.num_tokens for entry in self.scheduled)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position, of the raw distribution.

    `token_id`, `logprob` and `rank` (1 = most likely) are those of the token that stands there; `top_ids` and
    `top_logprobs` the most likely ones, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """What a step yields for one request: a token unless it is still in its prompt; logprobs where they were
    asked for.

    `prompt_logprobs` are those of the prompt tokens *after* each computed position, in order. `error` fails
    this request alone.
    """

    request_id: str
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


class StepOutput(msgspec.Struct, frozen=True):
    """Results of one step, one entry per scheduled request, in the plan's order."""

    step_id: int
    sampled: list[SampledToken]


class FinishReason(StrEnum):
    """Why a request ended."""

    stop = "stop"
    length = "length"
    abort = "abort"
    error = "error"


class RequestUpdate(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one step changed for one request. The last update of a request carries `finish_reason`; none
    follows it.

    `stop_reason` is the stop token id that ended the request, None for the end-of-sequence token.
    `num_cached_tokens`, `queued_s` and `prefill_s` come with the first update that carries tokens and with
    the last one, `num_preemptions` and `decode_s` with the last. Times are seconds by the engine's monotonic
    clock: `queued_s` from arrival to first schedule, `prefill_s` from there to the first token, `decode_s` to
    the last.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    error_param: str | None = None
    error_status: int = 500
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
