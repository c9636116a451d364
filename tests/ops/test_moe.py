"""Routing and experts of a row do not depend on the batch or on threads; odd logits stay within bounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pegainfer.kernels.moe.cpu  # noqa: F401
from pegainfer.errors import KernelError, WeightsError
from pegainfer.kernels.linear.cpu import NATIVE_FORMATS
from pegainfer.ops.moe import MoeRouterFacts, moe_experts, moe_router
from pegainfer.ops.op import Case, bind
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.dtypes import DType, WeightFormat
from tests.ops.native import LEVELS, device_of

Array = np.ndarray[Any, Any]


def route(device: CpuDevice, logits: Array, top_k: int, *, renormalize: bool = True) -> tuple[Array, Array]:
    rows, num_experts = logits.shape
    ids, weights = np.zeros((rows, top_k), np.int32), np.zeros((rows, top_k), np.float32)
    launch = bind(moe_router, MoeRouterFacts(num_experts, top_k, renormalize, DType.float32), device)
    given = {"logits": logits.astype(np.float32), "topk_ids": ids, "topk_weights": weights}
    launch(**{name: device.from_numpy(array) for name, array in given.items()})
    device.stream.synchronize()
    return ids, weights


@pytest.mark.parametrize("level", LEVELS)
def test_router_takes_the_lowest_of_equal_experts(level: str) -> None:
    logits = np.zeros((2, 40))
    logits[1, [5, 39]] = 1
    ids, weights = route(device_of(level, 2), logits, 4)
    assert ids.tolist() == [[0, 1, 2, 3], [5, 39, 0, 1]]
    assert weights[0].tolist() == [0.25] * 4
    assert weights[1].sum() == pytest.approx(1)
    assert route(device_of(level, 2), logits, 4, renormalize=False)[1][0].tolist() == [np.float32(1 / 40)] * 4


@pytest.mark.parametrize("level", LEVELS)
def test_router_rows_are_independent(level: str) -> None:
    logits = np.random.default_rng(0).normal(0, 2, (50, 60))
    together = route(device_of(level, 2), logits, 6)
    for r in range(50):
        alone = route(device_of(level, 1), logits[r : r + 1], 6)
        for one, all_rows in zip(alone, together, strict=True):
            assert np.array_equal(one[0], all_rows[r])


@pytest.mark.parametrize("level", LEVELS)
def test_router_names_experts_that_exist_even_for_nan(level: str) -> None:
    logits = np.full((3, 12), np.nan)
    logits[1, 3:] = 0
    logits[2] = np.inf
    ids, _ = route(device_of(level, 1), logits, 5)
    assert ((ids >= 0) & (ids < 12)).all()
    assert all(len(set(row)) == 5 for row in ids.tolist())


def case_of(format: WeightFormat) -> Case[Any]:
    """The case with the most rows."""
    cases = [case for case in moe_experts.cases(np.random.default_rng(2)) if case.facts.format is format]
    return max(cases, key=lambda case: len(case.arguments["x"]))


def run_experts(device: CpuDevice, case: Case[Any], rows: Array) -> Array:
    launch = bind(moe_experts, case.facts, device)
    tensors = {}
    for name, value in case.arguments.items():
        if isinstance(value, np.ndarray):
            tensors[name] = device.from_numpy(value[rows].copy())
        else:
            tensors[name] = value.for_device(case.facts, device, provider="native", launcher=launch)
    launch(**tensors)
    device.stream.synchronize()
    result: Array = tensors["out"].numpy()
    return result


@pytest.mark.parametrize("format", sorted(NATIVE_FORMATS))
@pytest.mark.parametrize("level", LEVELS)
def test_expert_rows_are_independent(level: str, format: WeightFormat) -> None:
    case = case_of(format)
    count = len(case.arguments["x"])
    together = run_experts(device_of(level, 2), case, np.arange(count))
    shuffled = np.random.default_rng(1).permutation(count)
    assert np.array_equal(run_experts(device_of(level, 1), case, shuffled), together[shuffled])
    for r in range(0, count, 5):
        assert np.array_equal(run_experts(device_of(level, 2), case, np.array([r]))[0], together[r])


@pytest.mark.parametrize("format", [WeightFormat.f32, WeightFormat.q4_1])
def test_more_rows_than_are_worked_on_at_once(format: WeightFormat) -> None:
    case, device = case_of(format), device_of(LEVELS[0], 2)
    count = len(case.arguments["x"])
    once = run_experts(device, case, np.arange(count))
    rows = np.random.default_rng(3).integers(0, count, 1300)
    assert np.array_equal(run_experts(device, case, rows), once[rows])


def test_an_expert_that_does_not_exist_is_an_error() -> None:
    case, device = case_of(WeightFormat.f32), device_of(LEVELS[0], 2)
    rows = np.arange(4)
    ids = case.arguments["topk_ids"].copy()
    for wrong in (-1, case.facts.num_experts):
        ids[2, 1] = wrong
        bad = replace(case, arguments={**case.arguments, "topk_ids": ids})
        with pytest.raises(KernelError, match="expert"):
            run_experts(device, bad, rows)
    assert np.isfinite(run_experts(device, case, rows)).all()


@pytest.mark.parametrize("level", LEVELS)
def test_wrong_experts_are_refused(level: str) -> None:
    case = case_of(WeightFormat.f32)
    device = device_of(level, 1)
    launch: Any = bind(moe_experts, case.facts, device)
    gate_up = device.zeros((launch.gate_up_bytes(),), DType.uint8)
    down = device.zeros((launch.down_bytes(),), DType.uint8)
    good = case.arguments["gate_up"]
    first, second = good.gate_up[0], good.down[0]
    with pytest.raises(WeightsError, match="shape"):
        launch.pack_expert(0, second, second, gate_up, down)
    halved = RawWeight(WeightFormat.f16, second.shape, second.data[:, : second.data.shape[1] // 2])
    with pytest.raises(WeightsError, match="f16"):
        launch.pack_expert(0, first, halved, gate_up, down)
    other = replace(case.facts, num_experts=case.facts.num_experts + 1)
    bigger: Any = bind(moe_experts, other, device)
    assert bigger.gate_up_bytes() > launch.gate_up_bytes()
