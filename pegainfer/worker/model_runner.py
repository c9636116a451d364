"""Runs a model over a step's inputs: staging, the step arenas, recorded forwards, logits in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegainfer.models.base import ForwardBatch, Model
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from pegainfer.worker.graphs import GraphCache
from pegainfer.worker.input_batch import StepLayout
from pegainfer.worker.kv_storage import KvStorage
from pegainfer.worker.staging import StagingBuffer

__all__ = ["ModelRunner", "StepLimits", "StepResult"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: tokens, requests, blocks per request, and rows of logits that exist at once."""

    num_tokens: int
    num_requests: int
    max_blocks: int
    num_logits: int

    @property
    def staging_fields(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """The arrays of a step, and the rows whose logits are wanted."""
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slot_mapping": (self.num_tokens,),
            "query_start_loc": (self.num_requests + 1,),
            "seq_lens": (self.num_requests,),
            "sampled_rows": (self.num_requests,),
            "scored_rows": (self.num_tokens,),
            "scored_tokens": (self.num_tokens,),
            "block_tables": (self.num_requests, self.max_blocks),  # last: only its used rows travel
        }
        return {name: (shape, DType.int32) for name, shape in shapes.items()}

    def nbytes(self, model: Model) -> int:
        """Memory of the staging and of both arenas."""
        staging = StagingBuffer.nbytes_of(self.staging_fields)
        return staging + model.forward_bytes(self.num_tokens) + model.logits_bytes(self.num_logits)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's hidden states, and the logits of the requests that sample when they fit into one slice."""

    hidden: Tensor
    logits: Tensor | None


class ModelRunner:
    """A model with the memory of its steps. Everything is enqueued on the device's stream, in order."""

    def __init__(
        self, model: Model, device: Device, *, storage: KvStorage, limits: StepLimits, use_graphs: bool
    ) -> None:
        self._model = model
        self._storage = storage
        self._limits = limits
        self.staging = StagingBuffer(device, limits.staging_fields)
        self._arena = Arena(device, model.forward_bytes(limits.num_tokens))
        # Logits have an arena of their own: a replayed forward does not tell where its arena was left.
        self._logits_arena = Arena(device, model.logits_bytes(limits.num_logits))
        self._graphs: GraphCache[StepResult] | None = GraphCache(device) if use_graphs else None

    def forward(self, layout: StepLayout) -> StepResult:
        """Run the step whose inputs are in the staging."""
        sampled = layout.sampled_positions
        num_sampled = len(sampled)
        self.staging.host["sampled_rows"][:num_sampled] = sampled
        num_logits = num_sampled if num_sampled <= self._limits.num_logits else 0
        num_tokens, num_requests = layout.num_tokens, layout.num_requests
        self.staging.upload(num_requests)

        def launch() -> StepResult:
            hidden = self._model.forward(self._batch(num_tokens, num_requests))
            return StepResult(
                hidden, self._logits(hidden, "sampled_rows", 0, num_logits) if num_logits else None
            )

        # Only decode steps come back in the same sizes; recording the others would push these out.
        if self._graphs is None or num_tokens != num_requests:
            return launch()
        return self._graphs.run((num_tokens, num_requests, num_logits), launch)

    def each_logits(
        self, hidden: Tensor, rows: str, num_rows: int, consume: Callable[[Tensor, int], None]
    ) -> None:
        """Logits of the `num_rows` hidden rows listed in the staging array `rows`, slice by slice.

        `consume(logits, start)` enqueues what reads them; the next slice takes their place.
        """
        step = self._limits.num_logits
        for start in range(0, num_rows, step):
            consume(self._logits(hidden, rows, start, min(start + step, num_rows)), start)

    def _batch(self, num_tokens: int, num_requests: int) -> ForwardBatch:
        self._arena.reset()
        tensors = self.staging.tensors
        return ForwardBatch(
            token_ids=tensors["token_ids"].rows(num_tokens),
            positions=tensors["positions"].rows(num_tokens),
            slot_mapping=tensors["slot_mapping"].rows(num_tokens),
            query_start_loc=tensors["query_start_loc"].rows(num_requests + 1),
            seq_lens=tensors["seq_lens"].rows(num_requests),
            block_tables=tensors["block_tables"].rows(num_requests),
            kv=self._storage.layers,
            arena=self._arena,
        )

    def _logits(self, hidden: Tensor, rows: str, start: int, stop: int) -> Tensor:
        self._logits_arena.reset()
        indices = self.staging.tensors[rows].slice(0, start, stop)
        return self._model.compute_logits(hidden, indices, self._logits_arena)
