"""Milliseconds of a step by what it is made up of: decodes, prompts, both. Through the real worker.

    python benchmarks/gpu/steps.py MODEL [--steps 64 0+8x1024 64+1x1984 ...] [--set MODULE:NAME=VALUE ...]

A step `D+PxN` decodes one token of each of D requests with about `--context` tokens, and computes P new
prompts of N tokens. Steps follow one another as they do in the engine, the next launched while one
runs; the median of `--rounds` counts, in the order given and then again, so that what drifts shows.
`--set` replaces a constant of a module before anything is bound, to compare choices of ours in a whole step
rather than in a kernel that runs alone.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import itertools
import json
import random
import re
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from machine import describe_machine

from pegainfer.config import EngineConfig
from pegainfer.engine.build import make_device
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import NewRequest, ScheduledRequest, StepPlan
from pegainfer.weights.loader import open_checkpoint
from pegainfer.worker.build import build_worker
from pegainfer.worker.worker import Worker

STEPS = ("1", "16", "64", "0+1x1024", "0+8x1024", "64+1x1984", "16+1x1024")
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
MAX_STEP = 8192
PASSES = 2


@dataclass(frozen=True, slots=True)
class Makeup:
    """What a step consists of."""

    decodes: int
    prompts: int
    length: int

    @classmethod
    def of(cls, text: str) -> Makeup:
        """`64`, `0+8x1024`, `64+1x1984`; raises `ValueError`."""
        found = re.fullmatch(r"(\d+)(?:\+(\d+)x(\d+))?", text)
        if found is None:
            raise ValueError(f"a step is D or D+PxN, not {text!r}")
        return cls(*(int(part or 0) for part in found.groups()))


class Stepper:
    """Steps of one worker, timed."""

    def __init__(self, worker: Worker, context: int) -> None:
        self._worker = worker
        self._context = context
        self._ids = itertools.count()
        self._steps = itertools.count()
        self._random = random.Random(time.time_ns())

    def time(self, makeup: Makeup, rounds: int) -> float:
        """Median milliseconds from one step's results to the next one's."""
        blocks = iter(range(self._worker.info.num_blocks))
        decodes = [self._begin(blocks, rounds) for _ in range(makeup.decodes)]
        spare = [self._take(blocks, makeup.length) for _ in range(2 * makeup.prompts)]
        in_flight, ends = 0, []
        released: deque[list[str]] = deque([[], []])
        for index in range(rounds):
            new = [self._new(makeup.length) for _ in range(makeup.prompts)]
            tables = spare[: makeup.prompts] if index % 2 else spare[makeup.prompts :]
            scheduled = [ScheduledRequest(id_, 1, self._context + index, [], True) for id_ in decodes]
            scheduled += [
                ScheduledRequest(request.request_id, makeup.length, 0, table, True)
                for request, table in zip(new, tables, strict=True)
            ]
            released.append([request.request_id for request in new])
            self._worker.submit(StepPlan(next(self._steps), new, scheduled, released.popleft()))
            in_flight += 1
            if in_flight == self._worker.info.max_steps_in_flight:
                self._worker.collect()
                in_flight -= 1
                ends.append(time.perf_counter())
        for _ in range(in_flight):
            self._worker.collect()
            ends.append(time.perf_counter())
        self._run([], [], [*decodes, *itertools.chain(*released)])
        return statistics.median(b - a for a, b in itertools.pairwise(ends)) * 1e3

    def _begin(self, blocks: Iterator[int], rounds: int) -> str:
        """A request whose prompt of `context` tokens is computed."""
        request = self._new(self._context)
        table = self._take(blocks, self._context + rounds + 1)
        for start in range(0, self._context, MAX_STEP):
            count = min(MAX_STEP, self._context - start)
            last = start + count == self._context
            entry = ScheduledRequest(request.request_id, count, start, [] if start else table, last)
            self._run([] if start else [request], [entry], [])
        return request.request_id

    def _run(self, new: list[NewRequest], scheduled: list[ScheduledRequest], released: list[str]) -> None:
        self._worker.submit(StepPlan(next(self._steps), new, scheduled, released))
        self._worker.collect()

    def _new(self, length: int) -> NewRequest:
        ids = self._random.choices(range(min(self._worker.info.vocab_size, 100_000)), k=length)
        return NewRequest(f"request-{next(self._ids)}", ids, length, GREEDY, seed=0)

    def _take(self, blocks: Iterator[int], tokens: int) -> list[int]:
        return list(itertools.islice(blocks, -(-tokens // self._worker.info.block_size)))


def replace_constant(text: str) -> None:
    """`MODULE:NAME=VALUE`, VALUE a Python literal; NAME must exist."""
    module_name, _, assignment = text.partition(":")
    name, _, value = assignment.partition("=")
    module = importlib.import_module(module_name)
    if not hasattr(module, name):
        raise SystemExit(f"{module_name} has no {name}")
    setattr(module, name, ast.literal_eval(value))


def main() -> int:
    """Build the worker, time the steps, print and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", nargs="*", type=Makeup.of, default=[Makeup.of(step) for step in STEPS])
    parser.add_argument("--set", nargs="*", default=[], metavar="MODULE:NAME=VALUE")
    parser.add_argument("--context", type=int, default=1088, help="tokens of the requests that decode")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    for text in options.set:
        replace_constant(text)
    config = EngineConfig.from_flat(
        model=str(options.model),
        device=options.device,
        max_num_batched_tokens=MAX_STEP,
        max_model_len=max(options.context + options.rounds + 32, MAX_STEP),
    )
    checkpoint = open_checkpoint(config.model, config.load)
    worker = build_worker(config, checkpoint, device=make_device(config))
    stepper, times = Stepper(worker, options.context), {makeup: [] for makeup in options.steps}
    for makeup in options.steps:
        stepper.time(makeup, 4)  # what is recorded or compiled when it first comes
    for _, makeup in itertools.product(range(PASSES), options.steps):
        times[makeup].append(round(stepper.time(makeup, options.rounds), 3))
    for makeup, found in times.items():
        name = f"{makeup.decodes}+{makeup.prompts}x{makeup.length}"
        print(f"{name:>12} {' '.join(f'{ms:8.3f}' for ms in found)} ms  {' '.join(options.set)}", flush=True)
    worker.close()
    if options.out is not None:
        rows = {f"{m.decodes}+{m.prompts}x{m.length}": found for m, found in times.items()}
        result = {"ms": rows, "set": options.set, "context": options.context, **describe_machine()}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
