"""Token ids that only the device knows yet: a step may be launched before the host has read the tokens
that the one before it sampled.

Where such an id belongs, the host writes `~i`: the token of row `i` of the last sampling.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op

__all__ = ["FeedTokensFacts", "feed_tokens"]

IntArray = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True, slots=True)
class FeedTokensFacts:
    """Nothing shapes this op."""


def _reference(
    facts: FeedTokensFacts,
    *,
    token_ids: IntArray,  # int32 [T], changed in place
    sampled: IntArray,  # int32 [R]; -1, no token, becomes 0: its request fails, whatever is computed
) -> None:
    pending = token_ids < 0
    token_ids[pending] = np.maximum(sampled[~token_ids[pending]], 0)


def _cases(rng: np.random.Generator) -> Iterator[Case[FeedTokensFacts]]:
    for num_tokens, num_sampled, share in ((1, 1, 1.0), (64, 64, 1.0), (700, 9, 0.3), (5, 3, 0.0)):
        token_ids = rng.integers(0, 1000, num_tokens).astype(np.int32)
        pending = rng.random(num_tokens) < share
        token_ids[pending] = ~rng.integers(0, num_sampled, pending.sum()).astype(np.int32)
        sampled = rng.integers(0, 1000, num_sampled).astype(np.int32)
        sampled[-1] = -1
        yield Case(
            name=f"{num_tokens}of{num_sampled}-{share}",
            facts=FeedTokensFacts(),
            arguments={"token_ids": token_ids, "sampled": sampled},
            outputs=("token_ids",),
        )


def _tolerance(facts: FeedTokensFacts) -> float:
    return 0.0


feed_tokens: Op[FeedTokensFacts] = Op("feed_tokens", _reference, _cases, _tolerance)
