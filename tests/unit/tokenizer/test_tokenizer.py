"""Encoding, special tokens, beginning-of-sequence, vocabulary bounds and stop sets."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

from pegainfer.errors import ConfigError, TokenizerError
from pegainfer.tokenizer.files import tokenizer_from_directory
from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.tokenizer.tokenizer import Tokenizer, stop_token_ids
from pegainfer.weights.gguf import GgufFile
from tests.toy_tokenizer import CHATML, SPECIALS, make_backend, make_toy, write_toy


def test_special_text_is_a_control_token_only_when_parsed(toy: Tokenizer) -> None:
    end = toy.special_tokens["<|im_end|>"]
    assert toy.encode("a<|im_end|>") == [ord("a"), end]
    assert toy.encode("a<|im_end|>", parse_special=False) == list(b"a<|im_end|>")


def test_added_tokens_that_are_not_special_are_always_found() -> None:
    toy = make_toy(plain_added=("<think>",))
    think = toy.token_id("<think>")
    assert think is not None
    assert toy.encode("<think>", parse_special=False) == [think]
    assert toy.decode([think]) == "<think>"
    assert think not in toy.special_ids


def test_parsing_can_differ_between_threads(toy: Tokenizer) -> None:
    def encode(i: int) -> list[int]:
        return toy.encode("<|im_end|>", parse_special=i % 2 == 0)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(encode, range(400)))
    assert all(len(ids) == (1 if i % 2 == 0 else 10) for i, ids in enumerate(results))


def test_t23_a_raw_prompt_gets_one_bos() -> None:
    toy = make_toy(bos="<|endoftext|>")
    bos = toy.bos_token_id
    assert toy.encode("Hi") == [bos, *b"Hi"]
    assert toy.encode("<|endoftext|>Hi") == [bos, *b"Hi"]
    assert toy.encode("Hi", add_special_tokens=False) == [*b"Hi"]
    assert toy.encode("<|endoftext|>Hi", add_special_tokens=False) == [bos, *b"Hi"]


@pytest.mark.parametrize("rule", ["tokenizer.json", "tokenizer_config.json"])
def test_t23_bos_by_either_rule(rule: str) -> None:
    backend = make_backend(bos="<|endoftext|>" if rule == "tokenizer.json" else None)
    toy = Tokenizer(backend, named_tokens={"bos_token": "<|endoftext|>"}, add_bos=True)
    assert toy.encode("Hi") == [toy.bos_token_id, *b"Hi"]


def test_configuration_can_forbid_bos() -> None:
    backend = make_backend(bos="<|endoftext|>")
    toy = Tokenizer(backend, named_tokens={"bos_token": "<|endoftext|>"}, add_bos=False)
    assert toy.encode("Hi") == [*b"Hi"]


def test_vocabulary_bounds(toy: Tokenizer, smollm2_tokenizer: Tokenizer) -> None:
    assert toy.decodable_vocab_size == 256 + 5 + len(SPECIALS)
    assert smollm2_tokenizer.decodable_vocab_size == 49152
    assert toy.max_chars_per_token == len("<|endoftext|>")


def test_vocabulary_with_gaps_reaches_to_the_last_id() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 9}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert Tokenizer(backend).decodable_vocab_size == 10


def test_lone_surrogates_become_replacements(toy: Tokenizer) -> None:
    assert toy.encode("a\ud800b") == list(b"a?b")


def test_sentencepiece_spelling() -> None:
    vocab = {"<unk>": 0, "<0xE4>": 1, "<0xBD>": 2, "<0xA0>": 3, "▁": 4, "H": 5, "i": 6, "▁H": 7, "▁Hi": 8}
    backend = Backend(
        models.BPE(vocab=vocab, merges=[("▁", "H"), ("▁H", "i")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("Hi Hi你")
    assert ids == [8, 8, 1, 2, 3]
    assert tokenizer.decode(ids) == backend.decode(ids) == "Hi Hi你"
    assert [tokenizer.token_bytes(i) for i in ids] == [b" Hi", b" Hi", b"\xe4", b"\xbd", b"\xa0"]


def test_unsupported_decoders_are_refused() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TokenizerError, match="WordPiece"):
        Tokenizer(backend)


def test_stop_set_is_the_union_with_generation_config_first(toy: Tokenizer) -> None:
    generation, config = (
        {"eos_token_id": [5, 6]},
        {"eos_token_id": 7, "text_config": {"eos_token_id": [6, 8]}},
    )
    assert stop_token_ids(generation, config, toy) == (5, 6, 7, 8, toy.eos_token_id)
    assert stop_token_ids({}, {"eos_token_id": None}, None) == ()
    assert stop_token_ids({"eos_token_id": 7}, {"eos_token_id": 7}, None) == (7,)


@pytest.mark.parametrize("value", ["7", -1, 1.5, True, [1, "x"], {"a": 1}])
def test_impossible_stop_ids_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        stop_token_ids({"eos_token_id": value}, {}, None)


def test_directory(tmp_path: Path) -> None:
    write_toy(tmp_path)
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.encode("hello<|im_end|>") == [259, 263]
    assert tokenizer.eos_token_id == 263
    assert tokenizer.chat_templates == {"default": CHATML}


def test_directory_templates(tmp_path: Path) -> None:
    write_toy(tmp_path)
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}, {"name": "x"}, 3]
    settings = {"chat_template": named, "eos_token": {"content": "<|im_end|>"}, "bos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenizer_from_directory(tmp_path).chat_templates == {"default": "D", "tool_use": "T"}
    (tmp_path / "chat_template.jinja").write_text("J é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    tokenizer = tokenizer_from_directory(tmp_path)
    assert tokenizer.chat_templates == {"default": "J é", "tool_use": "T", "rag": "R"}
    assert tokenizer.named_tokens == {"eos_token": "<|im_end|>"}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": 3}', '{"version": "1.0"}'])
def test_broken_tokenizer_files_are_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        tokenizer_from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--skip-tokenizer-init"):
        tokenizer_from_directory(tmp_path)


def test_broken_configuration_is_named(tmp_path: Path) -> None:
    write_toy(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        tokenizer_from_directory(tmp_path)


def test_gguf_tokenizer_starts_fast(smollm2: Path) -> None:
    best = min(_seconds_to_load(smollm2) for _ in range(3))
    assert best < 0.25


def _seconds_to_load(path: Path) -> float:
    start = time.perf_counter()
    tokenizer_from_gguf(GgufFile(path).metadata, where=path)
    return time.perf_counter() - start
