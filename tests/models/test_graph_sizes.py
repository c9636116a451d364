"""Which graph serves a step, where steps are padded: few sizes, none of them wrong. Needs no GPU."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.runtime.cpu import make_cpu_device
from pegainfer.worker import build
from pegainfer.worker.graphs import coarse_size, padded_size
from pegainfer.worker.model_runner import ModelRunner, StepLimits
from tests.models.tiny_models import checkpoint
from tests.models.worker_driver import engine_config


def runner(*, num_tokens: int = 8192, num_requests: int = 256, num_logits: int = 110) -> Any:
    """Just what decides about graphs."""
    made = object.__new__(ModelRunner)
    made._limits = StepLimits(num_tokens, num_requests, 64, num_logits)
    made._graphs = object()  # type: ignore[assignment]
    made._pads = True
    return made


def test_sizes_have_small_gaps() -> None:
    assert [padded_size(n) for n in (1, 2, 3, 5, 9, 13, 17, 33, 250, 257, 500)] == [
        *(1, 2, 4, 8, 12, 16, 24, 40, 256, 272, 512)
    ]
    assert [coarse_size(n) for n in (1, 2, 3, 5, 17, 64, 65)] == [1, 2, 4, 8, 32, 64, 128]


@pytest.mark.parametrize("count", [1, 3, 5, 16, 17, 100, 111, 200, 256])
def test_a_decode_step_stays_one(count: int) -> None:
    tokens, requests, logits = runner()._graph_key(count, count, count if count <= 110 else 0)
    assert tokens == requests
    assert count <= tokens <= count + max(3, count // 2)
    assert logits == 0 if count > 110 else count <= logits <= 110


def test_a_decode_step_never_exceeds_its_limits() -> None:
    for most in range(1, 40):
        for count in range(1, most + 1):
            key = runner(num_requests=most, num_logits=16)._graph_key(count, count, min(count, 16))
            assert key[0] == key[1] <= most
            assert count <= key[0]
            assert min(count, 16) <= key[2] <= 16


def test_a_small_prefill_never_looks_like_decode() -> None:
    shapes = set()
    for requests in range(1, 40):
        for tokens in range(requests + 1, 257):
            key = runner()._graph_key(tokens, requests, requests)
            if key is None:
                assert coarse_size(tokens) == coarse_size(requests) == 256 or coarse_size(tokens) > 256
                continue
            assert key[0] != key[1]
            assert key[0] >= tokens
            assert key[1] >= requests
            shapes.add(key)
    assert len(shapes) < 40


def test_a_large_prefill_has_no_graph() -> None:
    assert runner()._graph_key(300, 1, 1) is None
    assert runner(num_tokens=64)._graph_key(62, 4, 4) is not None
    assert runner(num_tokens=60)._graph_key(50, 2, 2) is None


@pytest.mark.parametrize(("max_num_seqs", "sizes"), [(1, 1), (6, 4), (16, 6), (300, 12)])
def test_decode_is_recorded_in_advance(
    monkeypatch: pytest.MonkeyPatch, max_num_seqs: int, sizes: int
) -> None:
    """On a GPU that is only described, which has no tokens for the warm-up."""
    monkeypatch.setattr(build, "_warm_up", lambda worker: None)
    config = engine_config(max_num_seqs=max_num_seqs, max_model_len=256)
    gpu: Any = PlannedGpu("sm_90a")
    worker = build._build_worker(config, checkpoint(), device=gpu, decodable_vocab_size=None)
    graphs: Any = worker._runner._graphs
    assert len(graphs) == sizes
    for count in range(1, min(max_num_seqs, 64) + 1):
        logits = count if count <= worker._runner._limits.num_logits else 0
        assert worker._runner._graph_key(count, count, logits) in graphs._entries


def test_nothing_is_recorded_eagerly_where_it_is_not_to_be() -> None:
    worker = build.build_worker(engine_config(), checkpoint(), device=make_cpu_device(1))
    assert len(worker._runner._graphs) == 0  # type: ignore[arg-type]
    worker.close()
