"""What a model is to the rest of the engine, and what one step hands to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pegainfer.kvcache.spec import FullAttention
from pegainfer.layers.parameters import ParameterTable
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.tensor import Tensor

__all__ = ["ForwardBatch", "LayerKv", "Model"]


@dataclass(frozen=True, slots=True)
class LayerKv:
    """One layer's part of the paged KV cache.

    Block `b` of the layer starts at byte `b * block_stride` of `memory` (which already includes the layer's
    offset).
    """

    memory: Tensor  # uint8
    block_stride: int
    block_size: int
    spec: FullAttention


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Inputs of one step, in a varlen layout: the tokens of all requests one after the other.

    Token `i` of request `r` (`query_start_loc[r] <= i < query_start_loc[r + 1]`) stands at position
    `positions[i]` and writes its key and value to slot `slot_mapping[i]` = block * block_size + offset; it
    sees the positions up to its own. `seq_lens[r]` counts the tokens of request `r` including this step's.
    The first `num_decodes` requests are known to have one token each.

    With `last_rows`, which lists the last token of each request (-1: a request without tokens), nobody asks
    for the others' hidden states: what a layer does beyond keys and values may be left out for them.
    """

    token_ids: Tensor  # int32 [num_tokens]
    positions: Tensor  # int32 [num_tokens]
    slot_mapping: Tensor  # int32 [num_tokens]
    query_start_loc: Tensor  # int32 [num_requests + 1]
    seq_lens: Tensor  # int32 [num_requests]
    block_tables: Tensor  # int32 [num_requests, max_blocks]
    kv: tuple[LayerKv, ...]
    arena: Arena
    one_each: Tensor  # int32 [num_requests + 1]: 0, 1, 2, ...; `query_start_loc` of one token a request
    num_decodes: int
    last_rows: Tensor | None = None  # int32 [num_requests]

    @property
    def num_tokens(self) -> int:
        """Rows of this step."""
        return self.token_ids.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests of this step."""
        return self.seq_lens.shape[0]


class Model(Protocol):
    """A model bound to a device. Calls only enqueue work on the device's stream; results live in the arena
    that they are given.
    """

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        ...

    @property
    def kv_specs(self) -> tuple[FullAttention, ...]:
        """One spec per layer that keeps keys and values, in the order of `ForwardBatch.kv`."""
        ...

    @property
    def parameters(self) -> ParameterTable:
        """The checkpoint tensors that the model takes."""
        ...

    @property
    def num_parameters(self) -> int: ...

    @property
    def weight_bytes(self) -> int:
        """Bytes of device memory that the parameters take."""
        ...

    @property
    def bytes_per_position(self) -> int:
        """Bytes of device memory that `prepare` takes per position."""
        ...

    def prepare(self, max_positions: int) -> None:
        """Make what depends on the longest context; called once, before the first step."""
        ...

    def forward_bytes(self, num_tokens: int) -> int:
        """Arena memory of a `forward` of `num_tokens`."""
        ...

    def logits_bytes(self, num_rows: int) -> int:
        """Arena memory of a `compute_logits` of `num_rows`."""
        ...

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states before the final norm: activation dtype `[num_tokens, hidden_size]`, or with
        `batch.last_rows` `[num_requests, hidden_size]`.
        """
        ...

    def compute_logits(self, hidden: Tensor, indices: Tensor, arena: Arena) -> Tensor:
        """Logits of the rows `indices` (int32 `[num_rows]`) of `hidden`: float32 `[num_rows, vocab_size]`."""
        ...
