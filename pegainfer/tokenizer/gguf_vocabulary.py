"""A tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pegainfer.errors import TokenizerError
from pegainfer.log import get_logger
from pegainfer.tokenizer.tokenizer import Tokenizer as OurTokenizer

__all__ = ["tokenizer_from_gguf"]

logger = get_logger(__name__)

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 3, 4, 5, 6
_SPACE = "\u2581"
_MAX_PIECE = 512

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD, _SYMBOLS = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_MARKED_WORD, _MARKED_SYMBOLS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS}|{_TAIL}"
_QWEN35 = rf"{_CONTRACTIONS}|{_MARKED_WORD}|\p{{N}}|{_MARKED_SYMBOLS}|{_TAIL}"
# `tokenizer.ggml.pre` -> what splits words: a pattern, or the plain GPT-2 rule with or without single digits.
_GPT2_PRE = ("default", "gpt-2", "gpt2", "phi-2", "olmo")
_DIGITS_PRE = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PATTERNS = {
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": _QWEN35,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, where: Path) -> OurTokenizer:
    """The tokenizer that the metadata describes; raises `TokenizerError` if it is absent, inconsistent or of
    another kind.
    """
    vocabulary = _Vocabulary(metadata, where)
    kind = vocabulary.text("model", "none")
    if kind == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise vocabulary.error(f"the tokenizer model {kind!r:.40} is not supported, only gpt2 and llama")
    for token, token_kind in vocabulary.added():
        special = token_kind != _USER_DEFINED
        added = AddedToken(token, special=special, normalized=False)
        (backend.add_special_tokens if special else backend.add_tokens)([added])
    named = vocabulary.named_tokens()
    prefix = (
        [named["bos_token"]] if vocabulary.flag("add_bos_token", adds_bos) and "bos_token" in named else []
    )
    suffix = [named["eos_token"]] if vocabulary.flag("add_eos_token", False) and "eos_token" in named else []
    if prefix or suffix:
        backend.post_processor = processors.TemplateProcessing(
            single=[*prefix, "$A", *suffix],
            pair=[*prefix, "$A", "$B", *suffix],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*prefix, *suffix}],
        )
    return OurTokenizer(backend, named_tokens=named, chat_templates=_chat_templates(metadata))


class _Vocabulary:
    """The checked token list."""

    def __init__(self, metadata: Mapping[str, Any], where: Path) -> None:
        self.metadata = metadata
        self._where = where
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not _is_strings(tokens):
            raise self.error("the file has no tokenizer; pass --tokenizer or --skip-tokenizer-init")
        kinds = metadata.get("tokenizer.ggml.token_type")
        if kinds is None:
            kinds = np.full(len(tokens), _NORMAL)
        if not isinstance(kinds, np.ndarray) or kinds.shape != (len(tokens),):
            raise self.error("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
        # Trailing unused entries only pad the embedding.
        used = np.flatnonzero(kinds != _UNUSED)
        size = int(used[-1]) + 1 if used.size else 0
        self.tokens: list[str] = tokens[:size]
        self.kinds: np.ndarray[Any, Any] = kinds[:size]

    @property
    def ids(self) -> dict[str, int]:
        """Text -> id."""
        return dict(zip(self.tokens, range(len(self.tokens)), strict=True))

    def added(self) -> list[tuple[str, int]]:
        """Tokens that are found in text before anything is split, with their kinds."""
        chosen = np.flatnonzero((self.kinds == _CONTROL) | (self.kinds == _USER_DEFINED))
        return [(self.tokens[i], int(self.kinds[i])) for i in chosen if self.tokens[i]]

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, bool) else default

    def text(self, key: str, default: str) -> str:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, str) else default

    def named_tokens(self) -> dict[str, str]:
        """What chat templates call the tokens: text by name."""
        keys = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad", "seperator": "sep"}
        named = {}
        for key, name in keys.items():
            token = self.metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(token, int) and 0 <= token < len(self.tokens):
                named[f"{name}_token"] = self.tokens[token]
        return named

    def error(self, problem: str) -> TokenizerError:
        return TokenizerError(f"{self._where}: {problem}")


def _byte_level(vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    pre = vocabulary.text("pre", "default")
    merges = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not _is_strings(merges):
        raise vocabulary.error("tokenizer.ggml.merges is missing")
    pattern = _PATTERNS.get(pre)
    llama3 = pattern is _LLAMA3
    split: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), split])
    elif pre in _DIGITS_PRE:
        split = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    elif pre not in _GPT2_PRE:
        known = sorted({*_GPT2_PRE, *_DIGITS_PRE, *_PATTERNS})
        raise vocabulary.error(
            f"the pre-tokenizer {pre!r:.40} is not supported (known: {', '.join(known)}); "
            "pass --tokenizer with the directory of the original model"
        )
    elif pre == "default":
        logger.warning("the GGUF file names no pre-tokenizer; text is split as GPT-2 does")
    try:
        pairs = [_pair(merge) for merge in merges]
        backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=llama3))
    except Exception as error:
        # The library raises bare Exceptions and TypeErrors for merges that do not fit the vocabulary.
        raise vocabulary.error(f"the merges do not fit the vocabulary ({str(error)[:120]})") from None
    if pattern in (_QWEN2, _QWEN35):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return backend, llama3


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) < len(vocabulary.tokens):
        raise vocabulary.error("tokenizer.ggml.scores does not fit tokenizer.ggml.tokens")
    ids = vocabulary.ids
    unknown = vocabulary.named_tokens().get("unk_token")
    has_bytes = bool((vocabulary.kinds == _BYTE).any())
    merges = _merges(vocabulary, ids, scores)
    backend = Tokenizer(
        models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    )
    spaces: list[Any] = [normalizers.Replace(" ", _SPACE)]
    strip: list[Any] = []
    if vocabulary.flag("add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend(_SPACE))
        strip = [decoders.Strip(content=" ", left=1)]
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(
    vocabulary: _Vocabulary, ids: dict[str, int], scores: np.ndarray[Any, Any]
) -> list[tuple[str, str]]:
    """Every way to put an ordinary token together from two others, best score first."""
    ordinary = {vocabulary.tokens[i] for i in np.flatnonzero(vocabulary.kinds == _NORMAL)}
    ranked: list[tuple[float, int, int, tuple[str, str]]] = []
    for token in ordinary:
        if len(token) > _MAX_PIECE:
            continue
        score = -float(scores[ids[token]])
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ordinary and right in ordinary:
                ranked.append((score, ids[left], ids[right], (left, right)))
    return [pair for *_, pair in sorted(ranked)]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    found = {"default": metadata.get(key), "tool_use": metadata.get(f"{key}.tool_use")}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _is_strings(value: Any) -> TypeGuard[list[str]]:
    """Lists in the metadata hold strings; other arrays are NumPy's."""
    return isinstance(value, list) and bool(value)
