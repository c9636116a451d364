"""From a prompt and sampling parameters to engine requests: everything that can be refused before the engine
sees it. Shared by the server and the offline API; the engine checks ids once more with `check_ids`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from pegainfer.config import EngineConfig
from pegainfer.engine.messages import AddRequest, EngineInfo
from pegainfer.errors import RequestError
from pegainfer.sampling_params import MAX_SEED, SamplingParams

__all__ = ["RequestLimits", "check_ids", "make_requests"]

_serial = itertools.count()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one engine can serve. `kv_capacity` is the number of tokens that its KV cache holds;
    `max_logprobs` -1 is no limit.
    """

    vocab_size: int
    max_model_len: int
    kv_capacity: int
    max_logprobs: int = 20
    priorities: bool = False

    @classmethod
    def of(cls, config: EngineConfig, info: EngineInfo) -> RequestLimits:
        """The limits of a running engine."""
        return cls(
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            kv_capacity=info.kv_capacity,
            max_logprobs=config.model.max_logprobs,
            priorities=config.scheduler.scheduling_policy == "priority",
        )


def make_requests(
    request_id: str,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    limits: RequestLimits,
    priority: int = 0,
    cache_salt: str | None = None,
    arrival_time: float | None = None,
) -> list[AddRequest]:
    """The `params.n` engine requests of one prompt, in the order of their choices.

    An unset `max_tokens` becomes what is left of the context. Each choice has a seed of its own; only the
    first one scores the prompt. Ids begin with `request_id` and never repeat. Raises `RequestError`.
    """
    check_ids(prompt_token_ids, params, vocab_size=limits.vocab_size)
    _check_logprobs(params, limits.max_logprobs)
    if priority and not limits.priorities:
        raise RequestError(
            "priority needs a server that runs with --scheduling-policy priority", param="priority"
        )
    max_tokens = _max_tokens(len(prompt_token_ids), params, limits)
    arrival = time.time() if arrival_time is None else arrival_time
    requests = []
    for index in range(params.n):
        own = msgspec.structs.replace(
            params,
            n=1,
            max_tokens=max_tokens,
            seed=None if params.seed is None else _nth_seed(params.seed, index),
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        )
        requests.append(
            AddRequest(
                request_id=f"{request_id}.{next(_serial)}",
                prompt_token_ids=prompt_token_ids,
                params=own,
                priority=priority,
                cache_salt=cache_salt,
                arrival_time=arrival,
            )
        )
    return requests


def check_ids(prompt_token_ids: Collection[int], params: SamplingParams, *, vocab_size: int) -> None:
    """Raise `RequestError` (naming the field) for an empty prompt or an id outside the logits."""
    if not prompt_token_ids:
        raise RequestError("the prompt must have at least one token", param="prompt")
    _check_range("prompt", prompt_token_ids, vocab_size)
    _check_range("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_range("logit_bias", params.logit_bias or (), vocab_size)
    _check_range("allowed_token_ids", params.allowed_token_ids or (), vocab_size)


def _check_range(name: str, ids: Collection[int], vocab_size: int) -> None:
    if not ids:
        return
    if set(map(type, ids)) != {int}:  # not isinstance: True would pass as 1
        wrong = next(token_id for token_id in ids if type(token_id) is not int)
        raise RequestError(f"{name}: token ids must be integers, got {wrong!r:.40}", param=name)
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise RequestError(
            f"{name}: token id {low if low < 0 else high} is out of the vocabulary (0 to {vocab_size - 1})",
            param=name,
        )


def _check_logprobs(params: SamplingParams, limit: int) -> None:
    if limit < 0:
        return
    for name, value in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if value is not None and (value > limit or value < 0):
            asked = "the whole vocabulary" if value < 0 else str(value)
            raise RequestError(
                f"{name} can be at most {limit} on this server (--max-logprobs), got {asked}", param=name
            )


def _max_tokens(num_prompt: int, params: SamplingParams, limits: RequestLimits) -> int:
    """How many tokens may be generated; raises `RequestError` when context or KV cache cannot hold them."""
    context, asked = limits.max_model_len, params.max_tokens
    least = max(1, params.min_tokens) if asked is None else asked
    if num_prompt + least > context:
        total = num_prompt + least
        raise RequestError(
            f"This model's maximum context length is {context} tokens. However, you requested {least} output "
            f"tokens and your prompt contains {num_prompt} input tokens, for a total of {total} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    # The last token is generated but never computed, so it needs no room.
    room = limits.kv_capacity + 1 - num_prompt
    if max(least, 1) > room:
        raise RequestError(
            f"The request needs {num_prompt + max(least, 1) - 1} tokens of KV cache and the server has "
            f"{limits.kv_capacity}. Please reduce the length of the input prompt or the number of requested "
            "output tokens, or give the server a larger KV cache.",
            param="input_tokens",
        )
    return min(context - num_prompt, room) if asked is None else asked


def _nth_seed(seed: int, index: int) -> int:
    """The seed of a choice: distinct per choice, in the range of seeds, the request's own for the first."""
    span = 2 * (MAX_SEED + 1)
    return (seed + index + MAX_SEED + 1) % span - MAX_SEED - 1
