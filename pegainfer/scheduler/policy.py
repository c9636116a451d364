"""Who is served before whom, what is refused, and how many tokens of a prompt a step takes."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from pegainfer.errors import ConfigError, RequestError
from pegainfer.scheduler.request import Request

__all__ = [
    "MAX_BYPASSES",
    "MAX_SKIPPED",
    "SchedulerSettings",
    "check_request",
    "chunk",
    "insert",
    "place",
    "prompt_budget",
    "remove",
]

MAX_BYPASSES = 16
"""How many later requests may be admitted before one that does not fit; then it is waited for."""
MAX_SKIPPED = 8
"""How many requests that do not fit a step looks past."""

_LEAST_PROMPT_SHARE = 4
"""One in so many tokens of a mixed step may always be a prompt's."""

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """The resolved limits of steps.

    With chunked prefill a step that also decodes computes at most `max_num_mixed_tokens` (None: no limit of
    its own), so that answers under way do not pause for long; however many decode, prompts get a share. A
    request ends with the first of `eos_token_ids` unless it ignores them. `max_steps_in_flight` steps may
    be scheduled before the first is reported back.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int | None = None
    enable_chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    eos_token_ids: frozenset[int] = frozenset()
    max_steps_in_flight: int = 1

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def max_running(self) -> int:
        """Requests that may run together, so that each of them can decode in every step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


def check_request(request: Request, settings: SchedulerSettings, *, capacity: int) -> None:
    """Raise `RequestError` for a request that can never be served; else fix where it must end."""
    request.admit(
        max_model_len=settings.max_model_len, capacity=capacity, eos_token_ids=settings.eos_token_ids
    )
    if not settings.enable_chunked_prefill and request.num_prompt_tokens > settings.max_num_batched_tokens:
        raise RequestError(
            f"the prompt has {request.num_prompt_tokens} tokens and a step computes at most "
            f"{settings.max_num_batched_tokens}; enable chunked prefill or raise max_num_batched_tokens",
            param="prompt",
        )


def chunk(num_remaining: int, budget: int, settings: SchedulerSettings) -> int:
    """How many of `num_remaining` tokens a step with `budget` tokens left takes; 0: wait for another step.

    Without chunked prefill only what no step could take at once is split: a preempted request that has
    outgrown it.
    """
    if num_remaining <= budget:
        return num_remaining
    if settings.enable_chunked_prefill or num_remaining > settings.max_num_batched_tokens:
        return budget
    return 0


def prompt_budget(num_decodes: int, budget: int, settings: SchedulerSettings) -> int:
    """How many tokens of prompts a step takes that decodes `num_decodes` and has `budget` left."""
    limit = settings.max_num_mixed_tokens
    if limit is None or not num_decodes or not settings.enable_chunked_prefill:
        return budget
    return min(budget, max(limit - num_decodes, limit // _LEAST_PROMPT_SHARE, 1))


def place(request: Request, index: int, settings: SchedulerSettings) -> tuple[int, int]:
    """The `order` of the `index`-th request that arrived."""
    return (request.priority if settings.policy == "priority" else 0, index)


def insert(queue: list[Request], request: Request) -> None:
    """Put a request into its place in a queue sorted by `order`."""
    insort(queue, request, key=_order)


def remove(queue: list[Request], request: Request) -> None:
    """Take a request out of a queue sorted by `order`."""
    del queue[bisect_left(queue, request.order, key=_order)]
