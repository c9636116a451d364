"""Streaming text: whole characters only, nothing lost, the same as in one piece."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pegainfer.tokenizer.detokenizer import Detokenizer
from pegainfer.tokenizer.tokenizer import Tokenizer
from tests.toy_tokenizer import make_toy

TOY = make_toy()


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push([token]) for token in ids]


def test_t01_characters_split_over_tokens_appear_when_complete() -> None:
    assert stream(TOY, list("👋".encode())) == ["", "", "", "👋"]
    assert stream(TOY, list("你好".encode())) == ["", "", "你", "", "", "好"]
    assert stream(TOY, list("a👍🏽b".encode())) == ["a", "", "", "", "👍", "", "", "", "🏽", "b"]


def test_t02_output_cut_inside_a_character_is_dropped() -> None:
    ids = list("👋".encode())[:2]
    assert stream(TOY, ids) == ["", ""]
    assert Detokenizer(TOY).push(ids) == ""
    assert TOY.decode(ids) == "\ufffd"


def test_t03_invalid_bytes_recover() -> None:
    assert stream(TOY, [0xF0, 0x9F, 0x41, 0x42]) == ["", "", "\ufffdA", "B"]
    assert stream(TOY, [0xFF, 0x41]) == ["\ufffd", "A"]
    assert stream(TOY, [0x80, 0xC3, 0xA9]) == ["\ufffd", "", "é"]


def test_special_tokens_are_skipped_or_shown() -> None:
    end = TOY.special_tokens["<|im_end|>"]
    assert Detokenizer(TOY).push([0x41, end, 0x42]) == "AB"
    assert Detokenizer(TOY, skip_special_tokens=False).push([0x41, end, 0x42]) == "A<|im_end|>B"


def test_ids_without_a_token_are_empty() -> None:
    assert Detokenizer(TOY).push([0x41, 100_000, 2**40, -1]) == "A"


@given(st.lists(st.integers(0, 260), max_size=60), st.data())
def test_any_chunking_gives_the_same_text(ids: list[int], data: st.DataObject) -> None:
    detokenizer, text, position = Detokenizer(TOY), "", 0
    while position < len(ids):
        count = data.draw(st.integers(1, 5))
        text += detokenizer.push(ids[position : position + count])
        position += count
    assert text == Detokenizer(TOY).push(ids)
    assert TOY.decode(ids).startswith(text)


@given(st.text(max_size=40))
def test_text_survives_the_round_trip(text: str) -> None:
    ids = TOY.encode(text, add_special_tokens=False, parse_special=False)
    assert "".join(stream(TOY, ids)) == text


def test_real_vocabulary_streams_what_it_decodes(smollm2_tokenizer: Tokenizer) -> None:
    text = "Řeka teče 🌊 — 你好, мир! 👩‍👩‍👧 naïve\n\n  end"
    ids = smollm2_tokenizer.encode(text)
    assert "".join(stream(smollm2_tokenizer, ids)) == text
    assert b"".join(smollm2_tokenizer.token_bytes(token) for token in ids) == text.encode()
