"""A request as the scheduler sees it: what was asked, how far it is, and when it has had enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pegainfer.errors import RequestError
from pegainfer.kvcache.manager import BlockTable
from pegainfer.kvcache.prefix_cache import HashChain
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import FinishReason, NewRequest

__all__ = ["Request", "RequestState"]

MAX_TOKEN_ID = 2**31 - 1


class RequestState(StrEnum):
    """Where a request is; a preempted one is waiting again."""

    waiting = "waiting"
    running = "running"
    finished = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """One request. The caller fills the first group of fields, the scheduler owns the rest.

    `seed` is the request's own or one that the engine drew. A lower `priority` is served first where the
    policy asks for it.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(default_factory=SamplingParams, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    priority: int = field(default=0, kw_only=True)
    cache_salt: str | None = field(default=None, kw_only=True)

    state: RequestState = field(default=RequestState.waiting, init=False)
    order: tuple[int, int] = field(default=(0, 0), init=False)
    """Place among all requests; the least comes first."""
    limit: int = field(default=0, init=False)
    """Prompt and generated tokens at which the request ends with `length`."""
    last_computed: int = field(default=0, init=False)
    """Tokens that are ever computed: the last one generated is not."""
    stop_ids: frozenset[int] = field(default=frozenset(), init=False)
    eos_ids: frozenset[int] = field(default=frozenset(), init=False)

    token_ids: list[int] = field(init=False)
    """The prompt and the generated tokens that the host knows."""
    num_tokens: int = field(init=False)
    """All tokens, those included that steps in flight are sampling."""
    num_computed_tokens: int = field(default=0, init=False)
    """Tokens whose computation was scheduled."""
    num_in_flight: int = field(default=0, init=False)
    """Scheduled steps that touch this request and have not been reported back."""
    num_prompt_logprobs: int = field(default=0, init=False)
    """Prompt log-probabilities that were delivered; a recomputed prompt yields them again."""
    num_preemptions: int = field(default=0, init=False)
    num_bypassed: int = field(default=0, init=False)
    """Requests that were admitted although this one was before them."""
    table: BlockTable | None = field(default=None, init=False)
    chain: HashChain | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens that the host knows."""
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that can be scheduled now: 1 for decode, more for a prompt, 0 when only results are
        awaited.
        """
        return min(self.num_tokens, self.last_computed) - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """Prompt log-probabilities need every position computed."""
        return self.params.prompt_logprobs is None

    def admit(self, *, max_model_len: int, capacity: int, eos_token_ids: frozenset[int]) -> None:
        """Fix where the request must end. `capacity` is the number of tokens that the KV cache can hold.

        Raises `RequestError` for a request that can never be served.
        """
        num_prompt = self.num_prompt_tokens
        if not num_prompt:
            raise RequestError("the prompt must have at least one token", param="prompt")
        if not 0 <= min(self.prompt_token_ids) <= max(self.prompt_token_ids) <= MAX_TOKEN_ID:
            raise RequestError(f"token ids must be between 0 and {MAX_TOKEN_ID}", param="prompt")
        max_tokens = self.params.max_tokens
        if num_prompt + (max_tokens != 0) > max_model_len:
            raise RequestError(
                f"the maximum context length is {max_model_len} tokens and the prompt has {num_prompt}, "
                "which leaves no room for output; shorten the prompt",
                param="prompt",
            )
        # The last token generated is never computed, so it needs no room.
        room = min(max_model_len, capacity + 1)
        self.limit = room if max_tokens is None else min(num_prompt + max_tokens, max_model_len)
        self.last_computed = max(self.limit - 1, num_prompt)
        if self.last_computed > capacity:
            raise RequestError(
                f"the request needs room for {self.last_computed} tokens and the KV cache holds {capacity}; "
                "shorten the prompt, lower max_tokens or give the engine more memory",
                param="prompt" if num_prompt > capacity else "max_tokens",
            )
        self.eos_ids = frozenset() if self.params.ignore_eos else eos_token_ids
        self.stop_ids = self.eos_ids.union(self.params.stop_token_ids)

    def check_end(self) -> tuple[FinishReason | None, int | None]:
        """Whether the last known token ends the request: the reason, and the token id that the client had
        listed.
        """
        token_id = self.token_ids[-1]
        if token_id in self.stop_ids and self.num_output_tokens >= self.params.min_tokens:
            return FinishReason.stop, None if token_id in self.eos_ids else token_id
        if len(self.token_ids) >= self.limit:
            return FinishReason.length, None
        return None, None

    def describe(self) -> NewRequest:
        """What a worker must know before it can compute any of it."""
        return NewRequest(
            self.request_id,
            self.token_ids.copy(),
            self.num_prompt_tokens,
            self.params,
            self.seed,
            tuple(sorted(self.stop_ids)),
        )
