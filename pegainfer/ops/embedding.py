"""Rows of a table by token id."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.linear import LinearFacts, linear, random_weight
from pegainfer.ops.op import Case, Op, bind
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = ["EmbeddingFacts", "embedding"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class EmbeddingFacts:
    """`tied`: the table is the packed weight of a `linear` of `vocab_size` outputs over `hidden_size` inputs;
    else the launcher packs it from the checkpoint's rows (`pack`, `packed_bytes`).
    """

    vocab_size: int
    hidden_size: int
    format: WeightFormat
    act: DType
    tied: bool

    @property
    def head(self) -> LinearFacts:
        """The linear op whose packed weight a tied table is."""
        return LinearFacts(self.hidden_size, self.vocab_size, self.format, self.act, out=DType.float32)


def _reference(
    facts: EmbeddingFacts,
    *,
    token_ids: Array,  # int32 [T]
    weight: Array,  # uint8
    out: Array,  # [T, hidden_size]
) -> None:
    rows = np.ascontiguousarray(weight.reshape(facts.vocab_size, -1)[token_ids])
    out[...] = RawWeight.from_rows(facts.format, (len(token_ids), facts.hidden_size), rows).dequantize()


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The table of a case, packed by the launcher, or by the linear op of the device where it is tied."""

    raw: RawWeight

    def for_reference(self, facts: EmbeddingFacts) -> Array:
        """The rows as they are."""
        return self.raw.rows().reshape(-1)

    def for_device(self, facts: EmbeddingFacts, device: Device, *, provider: str, launcher: Any) -> Tensor:
        """Packed by the launcher, or by the linear provider of the same name."""
        owner = launcher
        if facts.tied:
            named = (p for p in linear.providers if p.name == provider and p.kind is device.kind)
            owner = next(named).factory(facts.head, device) or bind(linear, facts.head, device)
        packed = owner.pack(self.raw)
        assert isinstance(packed, Tensor)
        assert packed.nbytes == owner.packed_bytes()
        return packed


def _cases(rng: np.random.Generator) -> Iterator[Case[EmbeddingFacts]]:
    for act in (DType.float32, DType.bfloat16):
        for format in WeightFormat:
            for tied in (True, False):
                for vocab_size, hidden_size, rows in ((70, 64, 1), (211, 96, 9), (300, 576, 33)):
                    ids = rng.integers(0, vocab_size, rows).astype(np.int32)
                    ids[-1] = vocab_size - 1
                    yield Case(
                        name=f"{act}-{format}-{'tied' if tied else 'own'}-{rows}of{vocab_size}x{hidden_size}",
                        facts=EmbeddingFacts(vocab_size, hidden_size, format, act, tied),
                        arguments={
                            "token_ids": ids,
                            "weight": _Table(random_weight(rng, format, vocab_size, hidden_size)),
                            "out": np.zeros((rows, hidden_size), act.numpy),
                        },
                        outputs=("out",),
                    )


def _tolerance(facts: EmbeddingFacts) -> float:
    return 1e-7 if facts.act is DType.float32 else 4e-3


embedding: Op[EmbeddingFacts] = Op("embedding", _reference, _cases, _tolerance)
