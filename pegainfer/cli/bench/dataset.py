"""Prompts for load generation: random ones of an exact length, or those of a file.

Lengths are counted by the server's own `/tokenize` and `/detokenize` (the shapes of vLLM and of llama.cpp),
so no tokenizer is needed here. Random prompts are different for every seed: nothing is replayed from a
prefix cache unless the seed is.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pegainfer.cli.bench.http import HttpClient, HttpError
from pegainfer.errors import ConfigError

__all__ = [
    "Prompt",
    "ServerTokenizer",
    "custom_prompts",
    "pronounceable_text",
    "random_prompts",
    "sharegpt_prompts",
]

_SAMPLE_WORDS = 4000
_ALIGN_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: text or token ids, its length in tokens (0: the server will tell), tokens to make."""

    content: str | list[int]
    num_tokens: int
    output_len: int


class ServerTokenizer:
    """`/tokenize` and `/detokenize` of the server under test."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client = client
        self._model = model

    async def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with the special tokens that the server adds to a prompt when `special`."""
        body = {
            "model": self._model,
            "prompt": text,
            "content": text,
            "add_special_tokens": special,
            "add_special": special,
        }
        ids = (await self._post("/tokenize", body)).get("tokens")
        if not isinstance(ids, list):
            raise ConfigError("the server's /tokenize gives no `tokens`; use --skip-tokenizer-init")
        return [int(token) for token in ids]

    async def decode(self, ids: list[int]) -> str:
        """Text of token ids."""
        answer = await self._post("/detokenize", {"model": self._model, "tokens": ids})
        text = answer.get("prompt", answer.get("content"))
        if not isinstance(text, str):
            raise ConfigError("the server's /detokenize gives no text; use --skip-tokenizer-init")
        return text

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.request("POST", path, body=body)
        if response.status != 200:
            raise ConfigError(
                f"the server answers {response.status} to {path}; for a server without it, use "
                "--skip-tokenizer-init --random-vocab-size N (random token ids instead of text)"
            )
        answer = response.json()
        if not isinstance(answer, dict):
            raise HttpError(f"the server did not answer {path} with an object")
        return answer


async def random_prompts(
    tokenizer: ServerTokenizer,
    count: int,
    *,
    rng: random.Random,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    as_ids: bool = False,
    vocab_size: int | None = None,
) -> list[Prompt]:
    """`count` prompts of `prefix_len` common and about `input_len` own tokens. Lengths are uniform within
    `1 ± range_ratio` of what is asked. `as_ids` gives token ids instead of text; below `vocab_size` if given.
    """
    if as_ids and vocab_size:
        pool, num_special = list(range(vocab_size)), 0
    else:
        pool, num_special = await _vocabulary(tokenizer, rng)
        num_special = 0 if as_ids else num_special
    prefix = rng.choices(pool, k=prefix_len)
    prompts = []
    for _ in range(count):
        length = max(1, _spread(rng, input_len, range_ratio) - num_special)
        wanted = max(1, _spread(rng, output_len, range_ratio))
        ids = prefix + rng.choices(pool, k=length)
        if as_ids:
            prompts.append(Prompt(ids, len(ids), wanted))
        else:
            text, aligned = await _aligned_text(tokenizer, ids, rng=rng, pool=pool)
            prompts.append(Prompt(text, aligned + num_special, wanted))
    return prompts


def custom_prompts(path: Path, count: int, *, output_len: int) -> list[Prompt]:
    """The first `count` prompts of a JSONL file with `prompt` (text or ids) and, optionally, `output_tokens`
    per line; the file is repeated when it is shorter.
    """
    prompts = []
    for number, line in enumerate(_read(path).splitlines(), 1):
        if line.strip():
            try:
                item = json.loads(line)
                content = item["prompt"]
                wanted = int(item.get("output_tokens", output_len))
            except (ValueError, KeyError, TypeError):
                raise ConfigError(f"{path}:{number}: expected a JSON object with `prompt`") from None
            prompts.append(Prompt(content, len(content) if isinstance(content, list) else 0, wanted))
    return _repeated(prompts, count, path)


async def sharegpt_prompts(
    path: Path, count: int, *, tokenizer: ServerTokenizer, rng: random.Random, output_len: int | None
) -> list[Prompt]:
    """First turns of ShareGPT conversations in random order, of 4 to 1024 tokens; outputs are as long as the
    answers in the file unless `output_len` is given.
    """
    try:
        conversations = json.loads(_read(path))
        turns = [[turn["value"] for turn in item["conversations"][:2]] for item in conversations]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: this is not a ShareGPT JSON file") from None
    pairs = [pair for pair in turns if len(pair) == 2]
    rng.shuffle(pairs)
    prompts: list[Prompt] = []
    for question, answer in pairs:
        if len(prompts) == count:
            break
        length = len(await tokenizer.encode(question))
        wanted = output_len or len(await tokenizer.encode(answer, special=False))
        if 4 <= length <= 1024 and wanted >= 4 and length + wanted <= 2048:
            prompts.append(Prompt(question, length, wanted))
    return _repeated(prompts, count, path)


async def _vocabulary(tokenizer: ServerTokenizer, rng: random.Random) -> tuple[list[int], int]:
    """Ids that occur in text, so that none is a control token, and how many special tokens a prompt gets."""
    text = pronounceable_text(rng)
    ids = await tokenizer.encode(text, special=False)
    with_special = await tokenizer.encode(text)
    return sorted(set(ids)), len(with_special) - len(ids)


def pronounceable_text(rng: random.Random) -> str:
    """Some thousand words of two to four syllables: text in which most of a vocabulary's pieces occur."""
    consonants, vowels = "bcdfghjklmnprstvwz", "aeiou"
    words = []
    for _ in range(_SAMPLE_WORDS):
        syllables = (rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(2, 4)))
        words.append("".join(syllables) + rng.choice(("", "n", "s", "r")))
    return " ".join(words)


async def _aligned_text(
    tokenizer: ServerTokenizer, ids: list[int], *, rng: random.Random, pool: list[int]
) -> tuple[str, int]:
    """Text of `len(ids)` tokens: encoding the text of random ids merges some, which are made up for."""
    target = len(ids)
    for _ in range(_ALIGN_ROUNDS):
        text = await tokenizer.decode(ids)
        ids = await tokenizer.encode(text, special=False)
        if len(ids) == target:
            break
        ids = ids[:target] + rng.choices(pool, k=max(0, target - len(ids)))
    return text, len(ids)


def _spread(rng: random.Random, length: int, ratio: float) -> int:
    return rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))) if ratio else length


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None


def _repeated(prompts: list[Prompt], count: int, path: Path) -> list[Prompt]:
    if not prompts:
        raise ConfigError(f"{path} holds no usable prompt")
    return [prompts[index % len(prompts)] for index in range(count)]
