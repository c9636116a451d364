"""Runs a model over a step's inputs: staging, the step arenas, recorded forwards, logits in slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from pegainfer.models.base import ForwardBatch, Model
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from pegainfer.worker.graphs import GraphCache, GraphKey, coarse_size, padded_size
from pegainfer.worker.input_batch import StepLayout
from pegainfer.worker.kv_storage import KvStorage
from pegainfer.worker.sampling_inputs import sampling_fields
from pegainfer.worker.staging import StagingBuffer

__all__ = ["ModelRunner", "StepLimits", "StepResult"]

_MAX_RECORDED_REQUESTS = 64
_LEAST_PADDED_TOKENS, _MAX_PADDED_TOKENS = 16, 256
"""Steps of up to so many tokens are recorded whatever they consist of, where graphs are padded."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step: tokens, requests, blocks per request, and rows of logits that exist at once."""

    num_tokens: int
    num_requests: int
    max_blocks: int
    num_logits: int

    @property
    def staging_fields(self) -> dict[str, tuple[tuple[int, ...], DType]]:
        """The arrays of a step, the requests' last rows, the rows whose logits are wanted, and what sampling
        reads.
        """
        fields = sampling_fields(self.num_requests)
        shapes: dict[str, tuple[int, ...]] = {
            "token_ids": (self.num_tokens,),
            "positions": (self.num_tokens,),
            "slot_mapping": (self.num_tokens,),
            "query_start_loc": (self.num_requests + 1,),
            "seq_lens": (self.num_requests,),
            "last_rows": (self.num_requests,),
            "sampled_rows": (self.num_requests,),
            "scored_rows": (self.num_tokens,),
            "scored_tokens": (self.num_tokens,),
            "block_tables": (self.num_requests, self.max_blocks),  # last: only its used rows travel
        }
        return fields | {name: (shape, DType.int32) for name, shape in shapes.items()}

    def nbytes(self, model: Model) -> int:
        """Memory of the staging and of both arenas."""
        staging = StagingBuffer.nbytes_of(self.staging_fields)
        return staging + model.forward_bytes(self.num_tokens) + model.logits_bytes(self.num_logits)


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step's hidden states, of all tokens or of each request's last one, and the logits of the requests
    that sample when they fit into one slice.
    """

    hidden: Tensor
    logits: Tensor | None


class ModelRunner:
    """A model with the memory of its steps. Everything is enqueued on the device's stream, in order."""

    def __init__(
        self,
        model: Model,
        device: Device,
        *,
        storage: KvStorage,
        staging: StagingBuffer,
        limits: StepLimits,
        use_graphs: bool,
    ) -> None:
        self._model = model
        self._stream = device.stream
        self._storage = storage
        self._limits = limits
        self._one_each = device.from_numpy(np.arange(limits.num_requests + 1, dtype=np.int32))
        self.staging = staging
        self._arena = Arena(device, model.forward_bytes(limits.num_tokens))
        # Logits have an arena of their own: a replayed forward does not tell where its arena was left.
        self._logits_arena = Arena(device, model.logits_bytes(limits.num_logits))
        self._graphs: GraphCache[StepResult] | None = GraphCache(device) if use_graphs else None
        # Where recording is cheap and rows are not, as on the CPU, each size has its own graph.
        self._pads = device.is_asynchronous

    def forward(
        self, layout: StepLayout, feed: Callable[[Tensor], None], *, needs_all: bool = False
    ) -> StepResult:
        """Run the step whose inputs are in the staging. `feed` enqueues the replacement of pending tokens.
        With `needs_all` there are hidden states of all tokens, not only of each request's last one.
        """
        host, num_requests = self.staging.host, layout.num_requests
        host["last_rows"][:num_requests] = layout.offsets[1:] - 1
        sampled = layout.sampling if not needs_all else layout.sampled_positions
        num_sampled = len(sampled)
        host["sampled_rows"][:num_sampled] = sampled
        num_logits = num_sampled if num_sampled <= self._limits.num_logits else 0
        used = (layout.num_tokens, num_requests, num_logits)
        key = None if needs_all else self._graph_key(*used)
        if key is not None:
            self._fill_up(used, key)
        self.staging.upload(num_requests)
        if layout.has_pending:
            feed(self.staging.tensors["token_ids"].rows(layout.num_tokens))

        if key is None or self._graphs is None:
            return self._launch(used, num_decodes=layout.num_decodes, needs_all=needs_all)
        result = self._graphs.run(key, partial(self._launch, key))
        return StepResult(result.hidden, result.logits.rows(num_logits) if result.logits else None)

    def record(self) -> None:
        """Record decode steps of all sizes up to `_MAX_RECORDED_REQUESTS` in advance, where that takes time
        that a request would wait for: where graphs are padded. The others, rarer and each a few megabytes of
        the library's kernels, are recorded when they come again.
        """
        if self._graphs is None or not self._pads:
            return
        most, keys = min(self._limits.num_requests, _MAX_RECORDED_REQUESTS), set()
        for count in range(1, most + 1):
            keys.add(self._graph_key(count, count, count if count <= self._limits.num_logits else 0))
        for key in sorted(filter(None, keys)):
            self.staging.host["query_start_loc"][0] = 0
            self._fill_up((0, 0, 0), key)
            self.staging.upload(key[1])
            self._graphs.record(key, partial(self._launch, key))
            self._stream.synchronize()  # the staging is written again

    def rehearse(self, num_tokens: int) -> None:
        """Run the model, and the head where it serves so many rows, on made-up tokens that leave no trace."""
        longest = self._limits.max_blocks * self._storage.block_size
        starts = [*range(0, num_tokens, longest), num_tokens]
        num_requests = len(starts) - 1
        if num_requests > self._limits.num_requests:
            return
        self.staging.advance()
        host, rows = self.staging.host, np.arange(num_tokens)
        host["token_ids"][:num_tokens] = rows % self._model.vocab_size
        host["positions"][:num_tokens] = 0
        host["slot_mapping"][:num_tokens] = -1
        host["query_start_loc"][: num_requests + 1] = starts
        host["seq_lens"][:num_requests] = np.diff(starts)
        host["block_tables"][:num_requests] = 0
        host["scored_rows"][:num_tokens] = rows
        self.staging.upload(num_requests)
        hidden = self._model.forward(self._batch(num_tokens, num_requests, num_decodes=0, needs_all=True))
        if num_tokens <= self._limits.num_logits:
            self._logits(hidden, "scored_rows", 0, num_tokens)

    def each_logits(
        self, hidden: Tensor, rows: str, num_rows: int, consume: Callable[[Tensor, int], None]
    ) -> None:
        """Logits of the `num_rows` hidden rows listed in the staging array `rows`, slice by slice.

        `consume(logits, start)` enqueues what reads them; the next slice takes their place.
        """
        step = self._limits.num_logits
        for start in range(0, num_rows, step):
            consume(self._logits(hidden, rows, start, min(start + step, num_rows)), start)

    def _launch(self, key: GraphKey, *, num_decodes: int = 0, needs_all: bool = False) -> StepResult:
        num_tokens, num_requests, num_logits = key
        if num_tokens == num_requests:
            num_decodes, needs_all = num_requests, True  # all tokens are last ones
        batch = self._batch(num_tokens, num_requests, num_decodes=num_decodes, needs_all=needs_all)
        hidden = self._model.forward(batch)
        return StepResult(hidden, self._logits(hidden, "sampled_rows", 0, num_logits) if num_logits else None)

    def _graph_key(self, num_tokens: int, num_requests: int, num_logits: int) -> GraphKey | None:
        """Sizes of the graph that serves a step; None: the step is launched as it is.

        Decode steps come back in the same sizes; with padding, other small ones do, too. Recording the others
        would push these out.
        """
        is_decode = num_tokens == num_requests
        if self._graphs is None:
            return None
        if not self._pads:
            return (num_tokens, num_requests, num_logits) if is_decode else None
        limits = self._limits
        size = padded_size if is_decode else coarse_size
        requests = min(size(num_requests), limits.num_requests)
        logits = min(size(num_logits), limits.num_logits, limits.num_requests) if num_logits else 0
        if is_decode:
            return requests, requests, logits
        tokens = max(coarse_size(num_tokens), _LEAST_PADDED_TOKENS)
        if tokens == requests:  # that would look like a decode step
            tokens *= 2
        if tokens > min(limits.num_tokens, _MAX_PADDED_TOKENS):
            return None
        return tokens, requests, logits

    def _fill_up(self, used: GraphKey, padded: GraphKey) -> None:
        """Inputs of rows that touch nothing: no token, no slot, no keys; requests without tokens."""
        host = self.staging.host
        (num_tokens, num_requests, num_logits), (tokens, requests, logits) = used, padded
        host["token_ids"][num_tokens:tokens] = -1
        host["positions"][num_tokens:tokens] = 0
        host["slot_mapping"][num_tokens:tokens] = -1
        host["query_start_loc"][num_requests + 1 : requests + 1] = num_tokens
        host["seq_lens"][num_requests:requests] = 0
        host["last_rows"][num_requests:requests] = -1
        host["sampled_rows"][num_logits:logits] = -1

    def _batch(
        self, num_tokens: int, num_requests: int, *, num_decodes: int, needs_all: bool
    ) -> ForwardBatch:
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
            one_each=self._one_each.rows(num_requests + 1),
            num_decodes=num_decodes,
            last_rows=None if needs_all else tensors["last_rows"].rows(num_requests),
        )

    def _logits(self, hidden: Tensor, rows: str, start: int, stop: int) -> Tensor:
        self._logits_arena.reset()
        indices = self.staging.tensors[rows].slice(0, start, stop)
        return self._model.compute_logits(hidden, indices, self._logits_arena)
