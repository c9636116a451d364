"""From updates to text: characters, stop strings, counts, reasons."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pegainfer.engine.messages import FinishReason, RequestUpdate
from pegainfer.engine.output import Collector, OutputDelta, OutputProcessor, Usage
from pegainfer.engine.stop_strings import StopStrings
from pegainfer.errors import RequestError
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.tokenizer.tokenizer import Tokenizer
from tests.toy_tokenizer import SPECIALS

EOS = 263


def push_text(processor: OutputProcessor, text: str, finish: FinishReason | None = None) -> OutputDelta:
    """One update whose tokens are the bytes of `text`."""
    return processor.push(RequestUpdate("r", list(text.encode()), finish_reason=finish))


def processor_of(toy: Tokenizer, **params: object) -> OutputProcessor:
    return OutputProcessor(SamplingParams(**params), toy)  # type: ignore[arg-type]


def test_the_toy_ends_where_these_tests_think(toy: Tokenizer) -> None:
    assert toy.token_id(SPECIALS[2]) == EOS == toy.eos_token_id


def test_t1_characters_come_whole(toy: Tokenizer) -> None:
    processor = processor_of(toy)
    pieces = [processor.push(RequestUpdate("r", [byte])).text for byte in "👋你好".encode()]
    assert pieces == ["", "", "", "👋", "", "", "你", "", "", "好"]


def test_t2_a_cut_character_is_dropped(toy: Tokenizer) -> None:
    processor = processor_of(toy)
    first = processor.push(RequestUpdate("r", list("👋".encode()[:1])))
    last = processor.push(RequestUpdate("r", list("👋".encode()[1:2]), finish_reason=FinishReason.length))
    assert (first.text, last.text, last.finish_reason) == ("", "", FinishReason.length)
    assert processor.num_tokens == 2


def test_t4_a_stop_string_over_several_chunks_never_leaks(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop="DEFGHIJ")
    deltas = [push_text(processor, text) for text in ("ABC", " DEF", "GHI", "JK")]
    assert [delta.text for delta in deltas] == ["ABC", " ", "", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (FinishReason.stop, "DEFGHIJ")
    assert deltas[-1].ends_early


def test_t5_a_false_alarm_loses_nothing(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop=["\nUser:"])
    assert push_text(processor, "foo\nUs").text == "foo"
    assert push_text(processor, "ual").text == "\nUsual"


def test_t5_the_true_alarm(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop=["\nUser:"])
    deltas = [push_text(processor, text) for text in ("foo\nUs", "er", ": hi")]
    assert [delta.text for delta in deltas] == ["foo", "", ""]
    assert deltas[-1].stop_reason == "\nUser:"


@pytest.mark.parametrize("finish", [FinishReason.length, FinishReason.stop, FinishReason.abort])
def test_withheld_text_is_flushed_at_the_end(toy: Tokenizer, finish: FinishReason) -> None:
    processor = processor_of(toy, stop=["\nUser:"])
    assert push_text(processor, "foo\nUs").text == "foo"
    tokens = [EOS] if finish is FinishReason.stop else []
    assert processor.push(RequestUpdate("r", tokens, finish_reason=finish)).text == "\nUs"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aX")])
def test_t6_the_earliest_of_several_stops(toy: Tokenizer, include: bool, text: str) -> None:
    processor = processor_of(toy, stop=["Y", "X"], include_stop_str_in_output=include)
    delta = push_text(processor, "aXbY")
    assert (delta.text, delta.stop_reason) == (text, "X")
    assert processor.num_tokens == 2  # what was generated behind the stop does not count
    assert delta.token_ids == list(b"aX")


def test_the_engines_end_counts_when_the_stop_string_comes_later(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop=["X"])
    delta = push_text(processor, "aX", FinishReason.length)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.stop, "X")
    assert not delta.ends_early


def test_updates_after_the_end_change_nothing(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop=["X"])
    push_text(processor, "X")
    assert push_text(processor, "more") == OutputDelta()
    assert processor.num_tokens == 1


def test_no_stop_string_before_min_tokens(toy: Tokenizer) -> None:
    processor = processor_of(toy, stop=["X"], min_tokens=3, max_tokens=9)
    assert push_text(processor, "aXb").text == "aXb"
    assert push_text(processor, "X").finish_reason is FinishReason.stop


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "a"),
        ({"skip_special_tokens": False}, "a"),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|im_end|>"),
    ],
)
def test_the_token_that_ends_an_answer_is_no_text(toy: Tokenizer, params: dict[str, bool], text: str) -> None:
    processor = processor_of(toy, **params)
    delta = processor.push(RequestUpdate("r", [97, EOS], finish_reason=FinishReason.stop))
    assert (delta.text, processor.num_tokens) == (text, 2)


def test_logprobs_end_with_the_text(toy: Tokenizer) -> None:
    entries = [TokenLogprobs(token, -1.0, 1, [], []) for token in b"aXb"]
    processor = processor_of(toy, stop=["X"], logprobs=0)
    delta = processor.push(RequestUpdate("r", list(b"aXb"), logprobs=entries))
    output = Collector()
    output.add(delta)
    assert output.logprobs == entries[:2]
    assert output.cumulative_logprob == -2.0


def test_a_failure_carries_its_status(toy: Tokenizer) -> None:
    update = RequestUpdate(
        "r", finish_reason=FinishReason.error, error="no", error_param="prompt", error_status=400
    )
    error = processor_of(toy).push(update).error
    assert isinstance(error, RequestError)
    assert (error.message, error.param, error.status, error.kind) == ("no", "prompt", 400, "BadRequestError")


def test_without_a_tokenizer_ids_come_without_text() -> None:
    processor = OutputProcessor(SamplingParams(), None)
    assert processor.push(RequestUpdate("r", [5, 6])) == OutputDelta(token_ids=[5, 6])
    with pytest.raises(RequestError, match="stop_token_ids"):
        OutputProcessor(SamplingParams(stop="x"), None)


def test_t7_usage_counts_each_prompt_once() -> None:
    usage = Usage(prompt_tokens=5, completion_tokens=3 * 4)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 12, 17)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Text and stop string by the definition: the first end of any stop string, the longest one there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text("ab", max_size=24),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    seed=st.integers(0, 2**32),
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stops: list[str], seed: int) -> None:
    rng = random.Random(seed)
    watcher = StopStrings(stops)
    got, found, start = "", None, 0
    while start < len(text) and found is None:
        end = rng.randint(start, len(text))
        piece, found = watcher.push(text[start:end])
        got += piece
        assert expected(text, stops)[0].startswith(got)
        start = end
    if found is None:
        got += watcher.flush()
    assert (got, found) == expected(text, stops)
