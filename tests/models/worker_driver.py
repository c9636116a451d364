"""Drives a worker by step plans, as a scheduler would, and checkpoints that live in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.config import EngineConfig
from pegainfer.engine.build import make_device
from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import NewRequest, SampledToken, ScheduledRequest, StepPlan, TokenLogprobs
from pegainfer.weights.checkpoint import Checkpoint, TensorInfo
from pegainfer.weights.loader import open_checkpoint
from pegainfer.weights.quantized import quantize
from pegainfer.worker.build import build_worker
from pegainfer.worker.worker import Worker

GOLDEN = Path(__file__).parent.parent / "golden"
GREEDY = SamplingParams(temperature=0.0)


class MemoryCheckpoint:
    """A checkpoint of float arrays; matrices are kept in the format that `formats` says, else in `format`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        weights: Mapping[str, np.ndarray[Any, Any]],
        *,
        format: WeightFormat = WeightFormat.bf16,
        formats: Mapping[str, WeightFormat] | None = None,
    ) -> None:
        self.path = Path("memory")
        self.config = dict(config)
        self.generation_config: dict[str, Any] = {}
        self.reads: list[str] = []
        self._weights = {
            name: quantize(values, (formats or {}).get(name, format if values.ndim > 1 else WeightFormat.f32))
            for name, values in weights.items()
        }

    def names(self) -> list[str]:
        return list(self._weights)

    def info(self, name: str) -> TensorInfo:
        if name not in self._weights:
            raise WeightsError(f"no tensor {name}")
        return TensorInfo(self._weights[name].format, self._weights[name].shape)

    def get(self, name: str) -> RawWeight:
        self.reads.append(name)
        return self._weights[name]

    def close(self) -> None:
        pass

    def values(self) -> dict[str, np.ndarray[Any, Any]]:
        """What the stored weights mean, as float32."""
        return {name: raw.dequantize() for name, raw in self._weights.items()}


def engine_config(**options: Any) -> EngineConfig:
    """Small defaults for tests."""
    defaults = {"device": "cpu", "num_threads": 2, "kv_cache_memory_bytes": 8 << 20, "max_num_seqs": 16}
    return EngineConfig.from_flat(**{**defaults, **options})


def golden_worker(name: str, **options: Any) -> Worker:
    """A worker of a golden fixture, opened as a user would."""
    config = engine_config(**{"model": str(GOLDEN / name), "dtype": "float32", **options})
    return make_worker(open_checkpoint(config.model, config.load), config)


def make_worker(
    checkpoint: Checkpoint,
    config: EngineConfig | None = None,
    *,
    decodable_vocab_size: int | None = None,
    **options: Any,
) -> Worker:
    """A worker on the configuration's device; `options` are those of `engine_config`, if there is none."""
    config = config or engine_config(**options)
    device = make_device(config)
    return build_worker(config, checkpoint, device=device, decodable_vocab_size=decodable_vocab_size)


class Driver:
    """Submits steps for named requests, with blocks of its own or given ones."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.blocks: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self._free = list(range(worker.info.num_blocks))
        self._new: list[NewRequest] = []
        self._released: list[str] = []
        self._known: set[str] = set()
        self._step = 0

    def add(
        self,
        request_id: str,
        tokens: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        num_prompt: int | None = None,
        seed: int = 0,
        stop_token_ids: tuple[int, ...] = (),
        shared_blocks: Sequence[int] = (),
    ) -> None:
        """Announce a request with the next step; the tokens of `shared_blocks` count as computed."""
        self._new.append(
            NewRequest(request_id, list(tokens), num_prompt or len(tokens), params, seed, stop_token_ids)
        )
        self.tokens[request_id] = list(tokens)
        self.blocks[request_id] = list(shared_blocks)
        self.computed[request_id] = len(shared_blocks) * self.worker.info.block_size

    def release(self, request_id: str) -> None:
        """Forget a request with the next step; its blocks are free at once."""
        self._released.append(request_id)
        self._known.discard(request_id)
        self._free = [*self.blocks.pop(request_id), *self._free]

    def step(self, counts: Mapping[str, int]) -> dict[str, SampledToken]:
        """Compute so many tokens of each request; those that reach their last known token sample."""
        scheduled = []
        for request_id, count in counts.items():
            start = self.computed[request_id]
            table = self.blocks[request_id]
            fresh = [] if request_id in self._known else list(table)
            while len(table) * self.worker.info.block_size < start + count:
                table.append(self._free.pop())
                fresh.append(table[-1])
            samples = start + count == len(self.tokens[request_id])
            scheduled.append(ScheduledRequest(request_id, count, start, fresh, samples))
            self.computed[request_id] = start + count
            self._known.add(request_id)
        self._step += 1
        self.worker.submit(StepPlan(self._step, self._new, scheduled, self._released))
        self._new, self._released = [], []
        output = self.worker.collect()
        assert output.step_id == self._step
        assert [entry.request_id for entry in output.sampled] == list(counts)
        for entry in output.sampled:
            if entry.token_id is not None:
                self.tokens[entry.request_id].append(entry.token_id)
        return {entry.request_id: entry for entry in output.sampled}

    def run(self, request_id: str, *, chunk: int = 1 << 30, num_new: int = 1) -> list[SampledToken]:
        """The request alone until it has sampled `num_new` tokens, its prompt in chunks."""
        outputs = []
        sampled = 0
        while sampled < num_new:
            left = len(self.tokens[request_id]) - self.computed[request_id]
            outputs.append(self.step({request_id: min(chunk, left)})[request_id])
            sampled += outputs[-1].token_id is not None
        return outputs


def prompt_scores(outputs: Iterable[SampledToken]) -> list[TokenLogprobs]:
    """The prompt log-probabilities of all steps, one after the other."""
    return [score for output in outputs for score in output.prompt_logprobs or []]


def full_rows(scores: Sequence[TokenLogprobs], vocab_size: int) -> np.ndarray[Any, Any]:
    """Log-probabilities of the whole vocabulary, `[len(scores), vocab_size]`, from complete alternatives."""
    rows = np.empty((len(scores), vocab_size))
    for row, score in zip(rows, scores, strict=True):
        assert sorted(score.top_ids) == list(range(vocab_size))
        row[score.top_ids] = score.top_logprobs
    return rows
