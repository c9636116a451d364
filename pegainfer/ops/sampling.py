"""From logits to the next token, and the log-probabilities of given tokens.

`sample` treats every row on its own, in this order:

1. log-probabilities, rank and top ids come from the logits as the model made them;
2. bias is added; penalties are applied (repetition over prompt and output, presence and frequency over the
   output); ids that are not allowed or not decodable drop out;
3. temperature below `GREEDY_TEMPERATURE`: the largest logit;
4. else temperature, min-p, top-k and top-p; then one uniform draw keyed by (seed, counter), and the first
   id whose cumulative probability over the kept ids, in id order, exceeds it.

Whenever logits are equal the lower id comes first. A row with NaN or +inf among its logits, or with nothing
left to choose from, yields -1. What a row did not ask for (`num_logprobs`) is left unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.ops.philox import uniform
from pegainfer.sampling_params import GREEDY_TEMPERATURE

__all__ = ["SamplingFacts", "sample", "token_logprobs"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class SamplingFacts:
    """Ids from `decodable_vocab_size` on are never sampled; no row asks for more than `max_top_logprobs`."""

    vocab_size: int
    decodable_vocab_size: int
    max_top_logprobs: int


def _sample(
    facts: SamplingFacts,
    *,
    logits: Array,  # float32 [R, vocab_size], may be overwritten
    temperature: Array,  # float32 [R]
    top_k: Array,  # int32 [R], 0: off
    top_p: Array,  # float32 [R]
    min_p: Array,  # float32 [R]
    presence: Array,  # float32 [R]
    frequency: Array,  # float32 [R]
    repetition: Array,  # float32 [R]
    seeds: Array,  # uint64 [R]
    counters: Array,  # int64 [R], output tokens so far
    history: Array,  # int32 [sum], prompt then output of each row
    history_start: Array,  # int32 [R + 1]
    prompt_lens: Array,  # int32 [R]
    bias_ids: Array,  # int32 [sum]
    bias_values: Array,  # float32 [sum]
    bias_start: Array,  # int32 [R + 1]
    allowed: Array | None,  # uint32 [R, ceil(vocab_size / 32)], bit set: allowed
    num_logprobs: Array,  # int32 [R], -1: none
    sampled: Array,  # int32 [R]
    logprobs: Array,  # float32 [R]
    ranks: Array,  # int32 [R], 1: the most likely
    top_ids: Array,  # int32 [R, max_top_logprobs]
    top_logprobs: Array,  # float32 [R, max_top_logprobs]
) -> None:
    for r, raw in enumerate(logits):
        sampled[r] = -1
        if np.isnan(raw).any() or np.isposinf(raw).any():
            continue
        x = raw[: facts.decodable_vocab_size].copy()
        own = slice(bias_start[r], bias_start[r + 1])
        known = bias_ids[own] < x.size
        np.add.at(x, bias_ids[own][known], bias_values[own][known])
        tokens = history[history_start[r] : history_start[r + 1]]
        _penalise(x, tokens, prompt_lens[r], repetition[r], presence[r], frequency[r])
        if allowed is not None:
            bits = np.unpackbits(allowed[r].astype("<u4").view(np.uint8), bitorder="little")[: x.size]
            x[bits == 0] = -np.inf
        largest = x.max()
        if not np.isfinite(largest):
            continue
        if temperature[r] < GREEDY_TEMPERATURE:
            sampled[r] = x.argmax()
        else:
            draw = uniform(int(seeds[r]), int(counters[r]))
            sampled[r] = _draw(x, temperature[r], int(top_k[r]), top_p[r], min_p[r], draw)
        if num_logprobs[r] >= 0:
            _score(raw, int(sampled[r]), int(num_logprobs[r]), r, logprobs, ranks, top_ids, top_logprobs)


def _penalise(
    x: Array,
    tokens: Array,
    prompt_len: int,
    repetition: np.float32,
    presence: np.float32,
    frequency: np.float32,
) -> None:
    seen = np.unique(tokens[tokens < x.size])
    x[seen] = np.where(x[seen] > 0, x[seen] / repetition, x[seen] * repetition)
    output = tokens[prompt_len:]
    ids, counts = np.unique(output[output < x.size], return_counts=True)
    x[ids] -= frequency * counts.astype(np.float32)
    x[ids] -= presence


def _draw(
    x: Array, temperature: np.float32, top_k: int, top_p: np.float32, min_p: np.float32, draw: float
) -> int:
    scaled = (x - x.max()) / temperature
    with np.errstate(divide="ignore"):  # min_p 0 keeps everything
        kept = np.flatnonzero(scaled >= np.log(min_p))
    order = kept[np.lexsort((kept, -x[kept]))]
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        weights = np.exp(scaled[order]).astype(np.float64)
        before = np.cumsum(weights) - weights
        order = order[before < np.float64(top_p) * weights.sum()]
    kept = np.sort(order)
    cumulative = np.cumsum(np.exp(scaled[kept]), dtype=np.float64)
    return int(kept[np.searchsorted(cumulative, draw * cumulative[-1], side="right")])


def _score(
    raw: Array,
    target: int,
    num_top: int,
    r: int,
    logprobs: Array,
    ranks: Array,
    top_ids: Array,
    top_logprobs: Array,
) -> None:
    """Write row `r` of the outputs: the log-probability and rank of `target`, and the `num_top` best ids."""
    values = raw.astype(np.float64)
    normalizer = values.max() + np.log(np.exp(values - values.max()).sum())
    logprobs[r] = values[target] - normalizer
    ranks[r] = 1 + np.count_nonzero(raw > raw[target]) + np.count_nonzero(raw[:target] == raw[target])
    best = np.lexsort((np.arange(raw.size), -raw))[:num_top]
    top_ids[r, :num_top] = best
    top_logprobs[r, :num_top] = values[best] - normalizer


def _token_logprobs(
    facts: SamplingFacts,
    *,
    logits: Array,  # float32 [R, vocab_size]
    targets: Array,  # int32 [R]
    num_logprobs: int,
    logprobs: Array,  # float32 [R]
    ranks: Array,  # int32 [R]
    top_ids: Array,  # int32 [R, max_top_logprobs]
    top_logprobs: Array,  # float32 [R, max_top_logprobs]
) -> None:
    for r, raw in enumerate(logits):
        _score(raw, int(targets[r]), num_logprobs, r, logprobs, ranks, top_ids, top_logprobs)


_ROWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 50},
    "top-k-1": {"top_k": 1},
    "top-k-beyond-vocab": {"top_k": 1 << 30},
    "top-p": {"top_p": 0.9},
    "top-p-tiny": {"top_p": 1e-6},
    "min-p": {"min_p": 0.05},
    "min-p-1": {"min_p": 1.0},
    "all-filters": {"temperature": 0.7, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
    "penalties": {"presence": 0.5, "frequency": 0.3, "repetition": 1.3},
    "greedy-penalties": {"temperature": 0.0, "presence": -1.5, "frequency": 2.0, "repetition": 0.7},
}


def _sample_cases(rng: np.random.Generator) -> Iterator[Case[SamplingFacts]]:
    for vocab_size, decodable in ((49152, 49152), (1000, 900), (17, 17), (151936, 151669)):
        rows, max_top = len(_ROWS), 5
        for flavour in ("plain", "biased", "masked", "odd"):
            logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
            biased = flavour in ("biased", "odd")
            bias_ids = rng.integers(0, vocab_size, 3 * rows if biased else 0).astype(np.int32)
            bias_values = rng.choice([-100, -np.inf, 1.5, 100], bias_ids.size).astype(np.float32)
            allowed: Array | None = None
            if flavour == "masked":
                allowed = rng.integers(0, 1 << 32, (rows, -(-vocab_size // 32)), np.uint32)
                allowed[0] = 0
                allowed[0, 0] = 1 << 7  # all but one
                allowed[1] = 0  # nothing
            if flavour == "odd":
                logits[0, 3], logits[1, vocab_size - 1], logits[2, 5] = np.nan, np.nan, np.inf
                logits[3] = -np.inf
                logits[4, 1:] = -np.inf
                logits[5:] = np.round(logits[5:])  # ties everywhere
            lengths = rng.integers(0, 60, rows)
            yield Case(
                name=f"{vocab_size}-{flavour}",
                facts=SamplingFacts(
                    vocab_size=vocab_size, decodable_vocab_size=decodable, max_top_logprobs=max_top
                ),
                arguments={
                    "logits": logits,
                    **_row_arguments(),
                    "seeds": rng.integers(0, 1 << 64, rows, np.uint64),
                    "counters": rng.integers(0, 1 << 40, rows),
                    "history": rng.integers(0, min(vocab_size, 40), lengths.sum()).astype(np.int32),
                    "history_start": np.cumsum([0, *lengths]).astype(np.int32),
                    "prompt_lens": (lengths // 2).astype(np.int32),
                    "bias_ids": bias_ids,
                    "bias_values": bias_values,
                    "bias_start": (np.arange(rows + 1) * (3 if biased else 0)).astype(np.int32),
                    "allowed": allowed,
                    "num_logprobs": (np.arange(rows) % (max_top + 2) - 1).astype(np.int32),
                    "sampled": np.zeros(rows, np.int32),
                    "logprobs": np.zeros(rows, np.float32),
                    "ranks": np.zeros(rows, np.int32),
                    "top_ids": np.zeros((rows, max_top), np.int32),
                    "top_logprobs": np.zeros((rows, max_top), np.float32),
                },
                outputs=("sampled", "logprobs", "ranks", "top_ids", "top_logprobs"),
            )


def _row_arguments() -> dict[str, Array]:
    """The per-row parameters of `_ROWS` as arrays."""
    defaults: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence": 0.0,
        "frequency": 0.0,
        "repetition": 1.0,
    }
    return {
        name: np.array(
            [row.get(name, default) for row in _ROWS.values()], np.int32 if name == "top_k" else np.float32
        )
        for name, default in defaults.items()
    }


def _token_logprobs_cases(rng: np.random.Generator) -> Iterator[Case[SamplingFacts]]:
    for rows, vocab_size, num_logprobs, max_top in ((1, 49152, 0, 1), (6, 1000, 5, 8), (3, 17, 17, 17)):
        logits = rng.normal(0, 4, (rows, vocab_size)).astype(np.float32)
        logits[-1] = np.round(logits[-1])
        logits[0, :3] = -np.inf
        targets = rng.integers(0, vocab_size, rows).astype(np.int32)
        targets[-1] = logits[-1].argmax()
        yield Case(
            name=f"{rows}x{vocab_size}-{num_logprobs}",
            facts=SamplingFacts(
                vocab_size=vocab_size, decodable_vocab_size=vocab_size, max_top_logprobs=max_top
            ),
            arguments={
                "logits": logits,
                "targets": targets,
                "num_logprobs": num_logprobs,
                "logprobs": np.zeros(rows, np.float32),
                "ranks": np.zeros(rows, np.int32),
                "top_ids": np.zeros((rows, max_top), np.int32),
                "top_logprobs": np.zeros((rows, max_top), np.float32),
            },
            outputs=("logprobs", "ranks", "top_ids", "top_logprobs"),
        )


def _tolerance(facts: SamplingFacts) -> float:
    return 1e-6


sample: Op[SamplingFacts] = Op("sample", _sample, _sample_cases, _tolerance)
token_logprobs: Op[SamplingFacts] = Op("token_logprobs", _token_logprobs, _token_logprobs_cases, _tolerance)
