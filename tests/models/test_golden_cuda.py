"""The golden gate on a GPU: float32 fixtures through the same worker, kernels and graphs that serve."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.sampling_params import SamplingParams
from tests.models.test_golden import FIXTURES, LIMIT, distance, scored
from tests.models.worker_driver import GOLDEN, Driver, golden_worker

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture_on_the_gpu(name: str) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    ids, expected = golden["input_ids"], golden["logits_f32"]
    length = ids.shape[1]
    worker = golden_worker(name, max_logprobs=-1, device="cuda")
    for cuts in ([], [1], [16, 17], list(range(length - 6, length))):
        ours = scored(worker, ids, cuts)
        assert distance(ours, expected) < LIMIT
        assert (ours.argmax(-1) == expected.argmax(-1)).all()


@pytest.mark.parametrize("name", ["llama_smol", "qwen3_dense"])
def test_replayed_steps_continue_alike(name: str) -> None:
    """Greedy continuations, one after the other and side by side, through recorded decode steps."""
    ids = np.load(GOLDEN / name / "golden.npz")["input_ids"]
    alone = []
    for row in ids.tolist():
        driver = Driver(golden_worker(name, device="cuda"))
        driver.add("a", row, SamplingParams(temperature=0.0))
        tokens = [driver.step({"a": len(row)})["a"].token_id]
        tokens += [driver.step({"a": 1})["a"].token_id for _ in range(12)]
        alone.append(tokens)
    driver = Driver(golden_worker(name, device="cuda"))
    names = [f"row {i}" for i in range(len(ids))]
    for request, row in zip(names, ids.tolist(), strict=True):
        driver.add(request, row, SamplingParams(temperature=0.0))
    steps = [driver.step(dict.fromkeys(names, ids.shape[1]))]
    steps += [driver.step(dict.fromkeys(names, 1)) for _ in range(12)]
    for request, expected in zip(names, alone, strict=True):
        assert [step[request].token_id for step in steps] == expected
