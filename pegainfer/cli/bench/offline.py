"""What the offline benchmarks share: an engine in this process, prompts of random ids, the result file."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pegainfer.cli.arguments import engine_values
from pegainfer.cli.bench.dataset import pronounceable_text
from pegainfer.errors import ConfigError

if TYPE_CHECKING:
    from pegainfer.llm import LLM

__all__ = ["offline_engine", "random_id_prompts", "write_json"]


@contextmanager
def offline_engine(namespace: argparse.Namespace) -> Iterator[LLM]:
    """The engine that the command line describes, until the block ends."""
    from pegainfer.llm import LLM

    with LLM(**engine_values(namespace)) as llm:
        yield llm


def random_id_prompts(
    llm: LLM, count: int, *, rng: random.Random, length: int, prefix: int = 0
) -> list[dict[str, list[int]]]:
    """`count` prompts of `prefix` common and `length` own ids that occur in text."""
    tokenizer = llm.get_tokenizer()
    pool = sorted(set(tokenizer.encode(pronounceable_text(rng), add_special_tokens=False)))
    common = rng.choices(pool, k=prefix)
    return [{"prompt_token_ids": common + rng.choices(pool, k=length)} for _ in range(count)]


def write_json(path: str | None, values: dict[str, Any]) -> None:
    """Write the result file if one was asked for; raises `ConfigError` where it cannot be."""
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(values, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: {error.strerror}") from None
