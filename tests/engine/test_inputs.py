"""What the front end refuses, and what it makes of the rest."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.engine.inputs import RequestLimits, make_requests
from pegainfer.errors import RequestError
from pegainfer.sampling_params import MAX_SEED, SamplingParams

V = 50
LIMITS = RequestLimits(vocab_size=V, max_model_len=32, kv_capacity=10_000)


def refused(prompt: list[Any], limits: RequestLimits = LIMITS, **params: Any) -> RequestError:
    """The error that a request gets."""
    with pytest.raises(RequestError) as caught:
        make_requests("r", prompt, SamplingParams(**params), limits=limits)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(33, None), (33, 1), (30, 10), (32, None), (32, 1), (1000, None)]
)
def test_t9_what_does_not_fit_the_context(num_prompt: int, max_tokens: int | None) -> None:
    error = refused([1] * num_prompt, max_tokens=max_tokens)
    assert "maximum context length is 32 tokens" in error.message
    assert error.param == "input_tokens"


@pytest.mark.parametrize(
    ("num_prompt", "asked", "granted"), [(30, None, 2), (31, None, 1), (30, 2, 2), (10, 5, 5), (32, 0, 0)]
)
def test_t9_what_fits(num_prompt: int, asked: int | None, granted: int) -> None:
    (request,) = make_requests("r", [1] * num_prompt, SamplingParams(max_tokens=asked), limits=LIMITS)
    assert request.params.max_tokens == granted


def test_unset_max_tokens_leaves_room_for_min_tokens() -> None:
    error = refused([1] * 30, max_tokens=None, min_tokens=3)
    assert "maximum context length is 32 tokens" in error.message


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(100, None), (60, 10), (66, 0), (65, 1)])
def test_t10_what_can_never_fit_the_kv_cache(num_prompt: int, max_tokens: int | None) -> None:
    limits = RequestLimits(vocab_size=V, max_model_len=128, kv_capacity=64)
    assert "KV cache" in refused([1] * num_prompt, limits, max_tokens=max_tokens).message


def test_t10_unset_max_tokens_ends_with_the_kv_cache() -> None:
    limits = RequestLimits(vocab_size=V, max_model_len=128, kv_capacity=64)
    (request,) = make_requests("r", [1] * 60, SamplingParams(max_tokens=None), limits=limits)
    assert request.params.max_tokens == 5  # the last one is not stored


@pytest.mark.parametrize("prompt", [[V], [-1], [2**63 - 1], [1, V], [True], ["1"], [1.0], [None]])
def test_t14_prompt_ids(prompt: list[Any]) -> None:
    assert refused(prompt).param == "prompt"


def test_an_empty_prompt() -> None:
    assert refused([]).param == "prompt"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {V: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("stop_token_ids", [V]),
        ("stop_token_ids", [1, -1]),
        ("allowed_token_ids", [V]),
    ],
)
def test_t14_ids_in_parameters(name: str, value: Any) -> None:
    assert refused([1], **{name: value}).param == name


def test_t14_no_allowed_ids_at_all() -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(allowed_token_ids=())
    assert caught.value.param == "allowed_token_ids"


@pytest.mark.parametrize(("name", "value"), [("logprobs", 21), ("prompt_logprobs", 21), ("logprobs", -1)])
def test_more_logprobs_than_the_server_gives(name: str, value: int) -> None:
    assert refused([1], **{name: value}).param == name


def test_any_number_of_logprobs_where_the_limit_is_off() -> None:
    limits = RequestLimits(vocab_size=V, max_model_len=32, kv_capacity=64, max_logprobs=-1)
    assert make_requests("r", [1], SamplingParams(logprobs=-1), limits=limits)


def test_priority_needs_the_policy() -> None:
    with pytest.raises(RequestError, match="scheduling-policy"):
        make_requests("r", [1], SamplingParams(), limits=LIMITS, priority=1)


def test_choices_have_seeds_of_their_own_and_one_scores_the_prompt() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=MAX_SEED, prompt_logprobs=1)
    requests = make_requests("r", [1], params, limits=LIMITS)
    seeds = [request.params.seed for request in requests]
    assert seeds == [MAX_SEED, -MAX_SEED - 1, -MAX_SEED]
    assert [request.params.prompt_logprobs for request in requests] == [1, None, None]
    assert len({request.request_id for request in requests}) == 3
    assert all(request.params.n == 1 for request in requests)


def test_the_same_name_twice_makes_distinct_requests() -> None:
    first, second = (make_requests("r", [1], SamplingParams(), limits=LIMITS)[0] for _ in range(2))
    assert first.request_id != second.request_id
