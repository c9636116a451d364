"""Tokenizers from GGUF metadata."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend

from pegainfer.errors import TokenizerError
from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.tokenizer.tokenizer import Tokenizer
from tests.toy_tokenizer import make_backend

HERE = Path("toy.gguf")


def byte_level_metadata(pre: str = "gpt-2", *, padding: int = 0) -> dict[str, Any]:
    """The toy tokenizer as GGUF metadata."""
    backend = make_backend(plain_added=("<think>",))
    size = backend.get_vocab_size()
    tokens = [backend.id_to_token(i) or "" for i in range(size)]
    kinds = [1] * (size - 4) + [3, 3, 3, 4] + [5] * padding
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + [f"[PAD{i}]" for i in range(padding)],
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o", "Ġ w"],
        "tokenizer.ggml.eos_token_id": size - 2,
        "tokenizer.ggml.bos_token_id": size - 4,
        "tokenizer.chat_template": "T",
    }


def sentencepiece_metadata() -> dict[str, Any]:
    """A little SentencePiece vocabulary: scores rank the merges."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3] + [6] * 256
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "▁hel", "▁hello"]
    scores = [0.0] * len(pieces) + [-20.0, -21.0, -22.0, -23.0, -24.0, -3.0, -1.0, -2.0, -4.0, -5.0]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces + words,
        "tokenizer.ggml.token_type": np.array(kinds + [1] * len(words), np.int32),
        "tokenizer.ggml.scores": np.array(scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def load(metadata: dict[str, Any]) -> Tokenizer:
    return tokenizer_from_gguf(metadata, where=HERE)


def test_same_ids_as_the_original() -> None:
    original, tokenizer = make_backend(plain_added=("<think>",)), load(byte_level_metadata())
    text = "hello world 12 你<|im_end|><think>\n"
    assert tokenizer.encode(text) == original.encode(text).ids
    assert tokenizer.special_tokens == {"<|endoftext|>": 261, "<|im_start|>": 262, "<|im_end|>": 263}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (261, 263)
    assert tokenizer.chat_templates == {"default": "T"}


def test_padding_is_not_decodable() -> None:
    tokenizer = load(byte_level_metadata(padding=7))
    assert tokenizer.decodable_vocab_size == 265
    assert tokenizer.token_bytes(266) == b""


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["hello", "Ġ12345", "x", "'s"]),
        ("smollm", ["hello", "Ġ", "1", "2", "3", "4", "5", "x", "'s"]),
        ("llama-bpe", ["hello", "Ġ", "123", "45", "x", "'s"]),
        ("qwen2", ["hello", "Ġ", "1", "2", "3", "4", "5", "x", "'s"]),
    ],
)
def test_words_split_as_the_pre_tokenizer_says(pre: str, words: list[str]) -> None:
    backend = Backend.from_str(load(byte_level_metadata(pre)).to_json())
    assert [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("hello 12345x's")] == words


def test_bos_follows_the_flag_and_the_family() -> None:
    assert load(byte_level_metadata()).encode("a") == [ord("a")]
    assert load(byte_level_metadata("llama-bpe")).encode("a") == [261, ord("a")]
    assert load(byte_level_metadata("llama-bpe") | {"tokenizer.ggml.add_bos_token": False}).encode("a") == [
        97
    ]
    assert load(byte_level_metadata() | {"tokenizer.ggml.add_eos_token": True}).encode("a") == [97, 263]


def test_sentencepiece() -> None:
    tokenizer = load(sentencepiece_metadata())
    names = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    ids = tokenizer.encode("hello helo!")
    # `el` has the best score, so that the second word never gets to `lo`.
    assert [names[i] for i in ids] == ["<s>", "▁hello", "▁hel", "o", "<0x21>"]
    assert tokenizer.decode(ids) == "hello helo!"
    assert tokenizer.encode("<s>", parse_special=False, add_special_tokens=False) != [1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.model": None}, "'none' is not supported"),
        ({"tokenizer.ggml.pre": "martian"}, "--tokenizer"),
        ({"tokenizer.ggml.tokens": None}, "--skip-tokenizer-init"),
        ({"tokenizer.ggml.tokens": np.zeros(3)}, "no tokenizer"),
        ({"tokenizer.ggml.token_type": np.zeros(3)}, "token_type"),
        ({"tokenizer.ggml.token_type": "x"}, "token_type"),
        ({"tokenizer.ggml.merges": None}, "merges"),
        ({"tokenizer.ggml.merges": ["no such"]}, "merges do not fit"),
        ({"tokenizer.ggml.merges": ["h"]}, "merges do not fit"),
    ],
)
def test_unusable_metadata_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(TokenizerError, match=problem) as caught:
        load(byte_level_metadata() | change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scores", [None, np.zeros(3, np.float32), ["x"]])
def test_sentencepiece_without_scores_is_refused(scores: Any) -> None:
    with pytest.raises(TokenizerError, match="scores"):
        load(sentencepiece_metadata() | {"tokenizer.ggml.scores": scores})


def test_smollm2(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("The capital of France is 1234")
    assert ids == [504, 3575, 282, 4649, 314, 216, 33, 34, 35, 36]
    assert smollm2_tokenizer.special_tokens["<|im_end|>"] == smollm2_tokenizer.eos_token_id == 2
