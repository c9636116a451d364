"""Which graph serves a step, where steps are padded: few sizes, none of them wrong. Needs no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.worker.graphs import coarse_size, padded_size
from pegainfer.worker.input_batch import StepLayout
from pegainfer.worker.model_runner import ModelRunner, StepLimits


def runner(*, num_tokens: int = 8192, num_requests: int = 256, num_logits: int = 110) -> Any:
    """Just what decides about graphs."""
    made = object.__new__(ModelRunner)
    made._limits = StepLimits(num_tokens, num_requests, 64, num_logits)
    made._graphs = object()  # type: ignore[assignment]
    made._pads = True
    return made


def layout(counts: list[int]) -> StepLayout:
    """A step of so many tokens a request."""
    offsets = np.cumsum([0, *counts])
    index = np.arange(len(counts))
    return StepLayout(index, index * 0, np.array(counts), offsets, index, False)


def test_sizes_have_small_gaps() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 5, 9, 13, 17, 33, 250, 257, 500)] == [
        *(1, 2, 4, 8, 12, 16, 24, 40, 256, 272, 512)
    ]
    assert [coarse_size(n) for n in (1, 2, 3, 5, 17, 64, 65)] == [1, 2, 4, 8, 32, 64, 128]


@pytest.mark.parametrize("count", [1, 3, 5, 16, 17, 100, 111, 200, 256])
def test_a_decode_step_stays_one(count: int) -> None:
    tokens, requests, logits = runner()._graph_key(layout([1] * count), count if count <= 110 else 0)
    assert tokens == requests
    assert count <= tokens <= count + max(3, count // 2)
    assert logits == 0 if count > 110 else count <= logits <= 110


def test_a_decode_step_never_exceeds_its_limits() -> None:
    for most in range(1, 40):
        for count in range(1, most + 1):
            key = runner(num_requests=most, num_logits=16)._graph_key(layout([1] * count), min(count, 16))
            assert key[0] == key[1] <= most
            assert count <= key[0]
            assert min(count, 16) <= key[2] <= 16


def test_a_small_prefill_never_looks_like_decode() -> None:
    shapes = set()
    for requests in range(1, 40):
        for extra in range(1, 257 - requests):
            counts = [1] * (requests - 1) + [1 + extra]
            key = runner()._graph_key(layout(counts), requests)
            if key is None:
                assert coarse_size(sum(counts)) * 2 > 256 or sum(counts) > 256
                continue
            assert key[0] != key[1]
            assert key[0] >= sum(counts)
            assert key[1] >= requests
            shapes.add(key)
    assert len(shapes) < 40


def test_a_large_prefill_has_no_graph() -> None:
    assert runner()._graph_key(layout([300]), 1) is None
    assert runner(num_tokens=64)._graph_key(layout([40, 20, 1, 1]), 4) is not None
    assert runner(num_tokens=60)._graph_key(layout([40, 10]), 2) is None
