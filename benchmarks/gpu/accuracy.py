"""The accuracy gate of 16-bit models at real shapes: our decode, teacher-forced against PyTorch in float32.

    python benchmarks/gpu/accuracy.py MODEL [--tokens 96] [--device cuda] [--out FILE]

MODEL is a Qwen3 checkpoint with bf16 weights, e.g. of random weights in a real shape
(`scripts/make-model benchmarks/gpu/qwen3-4b.json DIR`). One prompt is continued greedily in every way
in which a step can be made up; the reference then scores each continuation. Asked of all of them: regret
of each choice (nats that the reference finds its own favourite likelier by) at most 0.20; difference of
the log-probabilities of our 8 likeliest tokens 0.06 in the mean, 0.20 at the 99th percentile. Asked of
repetitions: the same bits. Needs PyTorch, which nothing else here does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe_machine, snapshot_path
from torch_reference import reference_logprobs

from pegainfer import LLM, SamplingParams

TOP = 8
LIMITS = {"max_regret": 0.20, "mean_difference": 0.06, "p99_difference": 0.20}
SEED = 11
PROMPT = 200


class Continuation:
    """What an engine made of the prompt: tokens, and ids and log-probabilities of the likeliest at each."""

    def __init__(self, output: Any) -> None:
        (choice,) = output.outputs
        self.num_cached_tokens = output.num_cached_tokens
        self.token_ids: list[int] = choice.token_ids
        self.top = [
            sorted(((entry.rank, id_, entry.logprob) for id_, entry in step.items()))[:TOP]
            for step in choice.logprobs
        ]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Continuation) and (self.token_ids, self.top) == (other.token_ids, other.top)

    __hash__ = None  # type: ignore[assignment]


def main() -> int:
    """Run every way, score, write the snapshot; 1 when something is outside its limit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ways, repeats = continuations(options.model, options.device, options.tokens)
    prompt = random_prompt(0, PROMPT)
    scores = reference_logprobs(
        options.model, [prompt + way.token_ids for way in ways.values()], options.device
    )
    rows = {
        name: judge(way, reference[PROMPT - 1 : -1].cpu().numpy())
        for (name, way), reference in zip(ways.items(), scores, strict=True)
    }
    failures = [
        f"{name}: {key} {row[key]} > {limit}"
        for name, row in rows.items()
        for key, limit in LIMITS.items()
        if row[key] > limit
    ]
    failures += [f"{name}: not the same bits" for name, same in repeats.items() if not same]
    for name, row in rows.items():
        print(f"{name:24} {row}")
    print(f"repeats: {repeats}")
    result = {
        "rows": rows,
        "identical": repeats,
        "limits": LIMITS,
        "tokens": options.tokens,
        "prompt": PROMPT,
    }
    target = options.out or snapshot_path(f"accuracy-{options.model.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result | describe_machine(), indent=1) + "\n")
    print("\n".join(failures) or "within the limits")
    return 1 if failures else 0


def continuations(model: Path, device: str, tokens: int) -> tuple[dict[str, Continuation], dict[str, bool]]:
    """Continuations of the prompt by how their steps were made up, and whether repetitions were equal."""
    ways: dict[str, Continuation] = {}
    repeats: dict[str, bool] = {}
    with engine(model, device) as run:
        ways["alone"] = run([], tokens)
        repeats["alone, again"] = run([], tokens) == ways["alone"]
        for others in (2, 7, 15, 23, 63):
            ways[f"among {others} others"] = run(others_of(others), tokens)
        ways["cached prompt"] = run([], tokens, cached=True)
        assert ways["cached prompt"].num_cached_tokens > 0
        repeats["cached prompt, again"] = run([], tokens, cached=True) == ways["cached prompt"]
    with engine(model, device, max_num_batched_tokens=48) as run:
        ways["prompt in chunks"] = run([], tokens)
    with engine(model, device, enforce_eager=True) as run:
        repeats["launched one by one"] = run([], tokens) == ways["alone"]
    with engine(model, device, async_scheduling=False) as run:
        repeats["step by step"] = run([], tokens) == ways["alone"]
    return ways, repeats


@contextmanager
def engine(model: Path, device: str, **options: Any) -> Iterator[Any]:
    """A function that continues the prompt beside others on an engine that is closed afterwards."""
    defaults = {"max_model_len": 2048, "kv_cache_memory_bytes": 8 << 30, "skip_tokenizer_init": True}
    with LLM(str(model), device=device, **{**defaults, **options}) as llm:

        def run(others: list[list[int]], tokens: int, *, cached: bool = False) -> Continuation:
            if not cached:
                llm.reset_prefix_cache()
            prompts = [random_prompt(0, PROMPT), *others]
            params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=TOP)
            return Continuation(llm.generate(prompts, params, use_tqdm=False)[0])

        yield run


def random_prompt(index: int, length: int) -> list[int]:
    """Token ids that depend on `index` alone."""
    ids: list[int] = np.random.default_rng((SEED, index)).integers(0, 100_000, length).tolist()
    return ids


def others_of(count: int) -> list[list[int]]:
    """Prompts of all kinds of lengths."""
    return [random_prompt(1 + index, 5 + 37 * index % 400) for index in range(count)]


def judge(way: Continuation, reference: np.ndarray[Any, Any]) -> dict[str, float]:
    """Regret and differences of a continuation by the reference's log-probabilities `[tokens, vocab]`."""
    regrets = [float(row.max() - row[token]) for row, token in zip(reference, way.token_ids, strict=True)]
    differences = [
        abs(logprob - float(row[id_]))
        for row, top in zip(reference, way.top, strict=True)
        for _, id_, logprob in top
    ]
    return {
        "max_regret": round(max(regrets), 4),
        "mean_difference": round(float(np.mean(differences)), 4),
        "p99_difference": round(float(np.quantile(differences, 0.99)), 4),
        "argmax_agrees": round(float(np.mean([regret == 0 for regret in regrets])), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
