#!/usr/bin/env python3
"""Prompt processing, generation and batched generation on the CPU, against llama.cpp with the same weights.

    python benchmarks/cpu/compare_llama_cpp.py [--models bf16 smollm2] [--llama-bin DIR] [--rounds 5]

Every round runs llama.cpp's bench tools and then ours, each when the machine is otherwise idle, so that both
see the same minutes of it; the ratios compare the best (least disturbed) and the median rounds. Ours goes
through `LLM.generate` with everything that a user gets: scheduler, paged KV cache, sampler. Results go to
`benchmarks/snapshots/cpu/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_cpp import LlamaCpp, build

from pegainfer import LLM, SamplingParams, __version__, envs
from pegainfer.runtime.cpu.isa import cpu_name
from pegainfer.runtime.cpu.limits import default_num_threads
from pegainfer.weights.builtin import pull

HERE = Path(__file__).resolve().parent
PROMPT, GENERATE, BATCH, BATCH_PROMPT = 512, 128, 8, 128
MODELS = {
    "bf16": "Qwen3-0.6B shape, bf16",
    "q8_0": "Qwen3-0.6B shape, Q8_0",
    "q4_0": "Qwen3-0.6B shape, Q4_0",
    "smollm2": "SmolLM2-135M, Q4_1",
}
METRICS = {"pp": f"prompt {PROMPT}", "tg": f"generation {GENERATE}", "b8": f"generation, batch {BATCH}"}


@dataclass(slots=True)
class Series:
    """Tokens/s of every round, by metric."""

    ours: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METRICS})
    theirs: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in METRICS})

    def as_json(self) -> dict[str, Any]:
        """Best, median and ratio by metric, and the rounds."""
        return {name: self._metric(name) for name in METRICS}

    def _metric(self, name: str) -> dict[str, Any]:
        ours, theirs = self.ours[name], self.theirs[name]
        return {
            "ours_best": max(ours),
            "ours_median": statistics.median(ours),
            "llama_cpp_best": max(theirs),
            "llama_cpp_median": statistics.median(theirs),
            "ratio_best": max(ours) / max(theirs),
            "ratio_median": statistics.median(ours) / statistics.median(theirs),
            "ours": ours,
            "llama_cpp": theirs,
        }


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-bench; built when not given")
    parser.add_argument("--cache", type=Path, default=envs.cache_dir() / "bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--out", type=Path, default=HERE.parent / "snapshots" / "cpu")
    options = parser.parse_args()
    llama = LlamaCpp(options.llama_bin or build(options.cache), threads=options.threads)
    results = {}
    for name in options.models:
        model = model_file(name, options.cache)
        series = measure(model, llama, rounds=options.rounds, threads=options.threads)
        results[name] = series.as_json()
        print(table({name: results[name]}), flush=True)
        save(options.out / f"{name}.json", name, results[name], threads=options.threads)
    print()
    print(table(results))
    return 0


def model_file(name: str, cache: Path) -> Path:
    """The GGUF file of a model, made when it is not there yet."""
    if name == "smollm2":
        return pull("smollm2")
    path = cache / f"qwen3-0.6b-{name}.gguf"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        script, partial = HERE.parents[1] / "scripts" / "make-model", path.with_suffix(".part.gguf")
        words = [str(HERE / "qwen3-0.6b.json"), str(partial), "--format", name]
        subprocess.run([sys.executable, str(script), *words], check=True)
        partial.rename(path)
    return path


def measure(model: Path, llama: LlamaCpp, *, rounds: int, threads: int) -> Series:
    """`rounds` times theirs, then ours."""
    series = Series()
    with engine(model, threads) as llm:
        ours = Ours(llm)
        ours.round()  # touch every page and record every graph once
        for _ in range(rounds):
            wait_until_quiet()
            prompt, generate = llama.bench(model, prompt=PROMPT, generate=GENERATE)
            batch = llama.batched(model, batch=BATCH, prompt=BATCH_PROMPT, generate=GENERATE)
            for name, value in {"pp": prompt, "tg": generate, "b8": batch}.items():
                series.theirs[name].append(value)
            wait_until_quiet()
            for name, value in ours.round().items():
                series.ours[name].append(value)
    return series


def wait_until_quiet(limit: float = 300.0) -> None:
    """Return when other processes leave the processors alone: threads that spin at barriers, as llama.cpp's,
    lose far more than their share to a neighbour. Leaves when that does not happen within `limit` seconds.
    """
    deadline = time.monotonic() + limit
    while busy_share(0.5) > 0.1:
        if time.monotonic() > deadline:
            sys.exit(f"the machine is busy with something else for {limit:g} s; measure when it is not")


def busy_share(seconds: float) -> float:
    """How much of all processors is in use over the next `seconds`, while this process sleeps."""

    def ticks() -> tuple[int, int]:
        fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(fields), fields[3] + fields[4]

    total, idle = ticks()
    time.sleep(seconds)
    total_after, idle_after = ticks()
    return 1 - (idle_after - idle) / (total_after - total)


@contextmanager
def engine(model: Path, threads: int) -> Iterator[LLM]:
    """Our engine, in this process, without a prefix cache."""
    llm = LLM(
        str(model),
        device="cpu",
        num_threads=threads,
        max_model_len=2 * PROMPT,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=512 << 20,
    )
    try:
        yield llm
    finally:
        llm.close()


class Ours:
    """Our side of a round."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._rng = random.Random(0)

    def round(self) -> dict[str, float]:
        """Tokens/s by metric. The batch's prompts are timed alone and taken off."""
        prompt = PROMPT / self._seconds(1, PROMPT, 1)
        generate = GENERATE / self._seconds(1, 1, GENERATE)
        prompts_alone = self._seconds(BATCH, BATCH_PROMPT, 1)
        batch = BATCH * GENERATE / (self._seconds(BATCH, BATCH_PROMPT, GENERATE + 1) - prompts_alone)
        return {"pp": prompt, "tg": generate, "b8": batch}

    def _seconds(self, count: int, prompt: int, generate: int) -> float:
        prompts = [
            {"prompt_token_ids": self._rng.choices(range(1000, 40000), k=prompt)} for _ in range(count)
        ]
        params = SamplingParams(temperature=0.0, max_tokens=generate, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert all(len(output.outputs[0].token_ids) == generate for output in outputs)
        return seconds


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown: best tokens/s of both, and the ratio of the bests (of the medians)."""
    heads = " | ".join(METRICS.values())
    lines = [f"| model | {heads} |", "|---" * (1 + len(METRICS)) + "|"]
    for name, result in results.items():
        cells = []
        for metric in METRICS:
            r = result[metric]
            cells.append(
                f"{r['ours_best']:.0f} / {r['llama_cpp_best']:.0f} = "
                f"**{r['ratio_best']:.2f}** (median {r['ratio_median']:.2f})"
            )
        lines.append(f"| {MODELS[name]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def save(path: Path, name: str, result: dict[str, Any], *, threads: int) -> None:
    """One snapshot file per model."""
    path.parent.mkdir(parents=True, exist_ok=True)
    snapshot = {
        "date": datetime.date.today().isoformat(),
        "model": MODELS[name],
        "processor": cpu_name(),
        "threads": threads,
        "pegainfer": __version__,
        "unit": "tokens per second",
        **result,
    }
    path.write_text(json.dumps(snapshot, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
