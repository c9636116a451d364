"""What the worker remembers of the requests it serves, one row each, and how that becomes a step's inputs.

Rows persist between steps: token ids, the block table, counts. A step gathers from them with array operations
only, so its cost does not grow with the number of tokens in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.scheduler.plan import NewRequest, ScheduledRequest
from pegainfer.worker.staging import StagingBuffer

__all__ = ["InputBatch", "IntArray", "StepLayout"]

IntArray = np.ndarray[Any, np.dtype[np.integer[Any]]]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Where the requests of a step stand in its arrays, in the order of the plan.

    Request `i` has the row `rows[i]` and the tokens `[starts[i], starts[i] + counts[i])` at the step's
    positions `[offsets[i], offsets[i + 1])`. `sampling` lists the `i` that sample. `has_pending`: some tokens
    are those of a sampling that has not been read yet (see `ops.feed`).
    """

    rows: IntArray
    starts: IntArray
    counts: IntArray
    offsets: IntArray
    sampling: IntArray
    has_pending: bool

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.offsets[-1])

    @property
    def num_requests(self) -> int:
        """Requests of the step."""
        return len(self.rows)

    @property
    def num_decodes(self) -> int:
        """How many requests in front have one token each."""
        longer = np.flatnonzero(self.counts > 1)
        return int(longer[0]) if len(longer) else self.num_requests

    @property
    def sampled_positions(self) -> IntArray:
        """Positions, in the step, of the last tokens of the requests that sample."""
        return self.offsets[self.sampling + 1] - 1


class InputBatch:
    """Rows of up to `max_num_seqs` requests of up to `max_model_len` tokens."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        # Untouched pages of these tables take no memory. The last token sampled is never computed, only kept.
        self.tokens = np.zeros((max_num_seqs, max_model_len + 1), np.int32)
        self.block_tables = np.zeros((max_num_seqs, self.max_blocks), np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        self._num_blocks = np.zeros(max_num_seqs, np.int64)
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: NewRequest) -> int:
        """The row that a request gets; what was known of one of the same id is forgotten first."""
        self.remove(request.request_id)
        assert self._free, "there are more running requests than max_num_seqs"
        row = self._free.pop()
        self._rows[request.request_id] = row
        count = len(request.token_ids)
        self.tokens[row, :count] = request.token_ids
        self.num_tokens[row] = count
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self._num_blocks[row] = 0
        return row

    def remove(self, request_id: str) -> int | None:
        """Free the row of a request and return it; None for an unknown id."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row)
        return row

    def append_pending(self, rows: IntArray) -> IntArray:
        """Add to each of `rows` the token that the sampling of these rows, in this order, will yield, and
        return where they stand. Until `resolve` the token of `rows[i]` is `~i`, as `ops.feed` reads it; no
        other sampling may begin while one is pending, but in the step that computes these tokens.
        """
        positions = self.num_tokens[rows]
        self.tokens[rows, positions] = ~np.arange(len(rows))
        self.num_tokens[rows] += 1
        return positions

    def resolve(self, rows: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Tokens that were pending."""
        self.tokens[rows, positions] = token_ids

    def history(self, row: int) -> IntArray:
        """The tokens of a row: prompt, then output."""
        return self.tokens[row, : self.num_tokens[row]]

    def prepare(self, scheduled: Sequence[ScheduledRequest], staging: StagingBuffer) -> StepLayout:
        """Write a step's inputs to the next arrays of `staging`: the fields of `ForwardBatch` by name."""
        staging.advance()
        rows = np.array([self._rows[entry.request_id] for entry in scheduled], np.int64)
        starts = np.array([entry.num_computed_tokens for entry in scheduled], np.int64)
        counts = np.array([entry.num_tokens for entry in scheduled], np.int64)
        for row, entry in zip(rows, scheduled, strict=True):
            if entry.new_block_ids:
                self._extend_table(row, entry.new_block_ids)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        ends = starts + counts
        assert counts.min() > 0, "a step computes at least one token of each of its requests"
        assert (ends <= self.num_tokens[rows]).all(), "a step goes beyond known tokens"
        assert (ends <= self._num_blocks[rows] * self.block_size).all(), "a step goes beyond its blocks"
        sampling = np.array([i for i, entry in enumerate(scheduled) if entry.samples], np.int64)
        has_pending = self._fill(rows, starts, counts, offsets, staging.host)
        return StepLayout(rows, starts, counts, offsets, sampling, has_pending)

    def _fill(
        self,
        rows: IntArray,
        starts: IntArray,
        counts: IntArray,
        offsets: IntArray,
        host: dict[str, np.ndarray[Any, Any]],
    ) -> bool:
        """Write the inputs; whether one of the tokens is pending."""
        num_tokens, num_requests = int(offsets[-1]), len(rows)
        if num_tokens == num_requests:
            row_of_token, positions = rows, starts
        else:
            row_of_token = np.repeat(rows, counts)
            positions = np.arange(num_tokens) + np.repeat(starts - offsets[:-1], counts)
        blocks, within = np.divmod(positions, self.block_size)
        token_ids = self.tokens[row_of_token, positions]
        host["token_ids"][:num_tokens] = token_ids
        host["positions"][:num_tokens] = positions
        host["slot_mapping"][:num_tokens] = self.block_tables[row_of_token, blocks] * self.block_size + within
        host["query_start_loc"][: num_requests + 1] = offsets
        ends = starts + counts
        host["seq_lens"][:num_requests] = ends
        width = -(-int(ends.max()) // self.block_size)
        host["block_tables"][:num_requests, :width] = self.block_tables[rows, :width]
        return bool(token_ids.min() < 0)

    def _extend_table(self, row: int, block_ids: list[int]) -> None:
        start = int(self._num_blocks[row])
        self.block_tables[row, start : start + len(block_ids)] = block_ids
        self._num_blocks[row] = start + len(block_ids)
