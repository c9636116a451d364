"""Every provider of the GPU against the reference of its op, on every case. A provider is tested by being
registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pegainfer.kernels import FAMILIES, load_providers
from pegainfer.ops.moe import MoeExpertsFacts, experts_case, moe_experts
from pegainfer.ops.op import Case, Op, all_ops, bind
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from tests.ops.parity import check_provider

load_providers(DeviceKind.cuda)

OPS = all_ops()
BF16, F16 = (DType.bfloat16, WeightFormat.bf16), (DType.float16, WeightFormat.f16)


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from pegainfer.runtime.cuda.device import make_cuda_device

    device = make_cuda_device()
    yield device
    device.close()


def limit_of(op: Op[Any], facts: Any) -> float:
    """The op's tolerance, except where the reference rounds or quantises float32 activations as the CPU does:
    a GPU leaves them as they are.
    """
    format = getattr(facts, "format", None)
    if op.name in ("linear", "moe_experts") and facts.act is DType.float32:
        if format is WeightFormat.bf16:
            return 4e-3
        if format.block_size > 1:
            return 2e-2
    return op.tolerance(facts)


def test_every_family_has_a_provider() -> None:
    served = {op.name for op in OPS.values() if any(p.kind is DeviceKind.cuda for p in op.providers)}
    assert served == set(OPS)
    assert len(served) >= len(FAMILIES)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_provider(gpu: Any, name: str) -> None:
    op = OPS[name]
    for provider in [p for p in op.providers if p.kind is DeviceKind.cuda]:
        served = 0
        for case in op.cases(np.random.default_rng(7)):
            served += check_provider(op, provider, case, gpu, limit=limit_of(op, case.facts))
        assert served, f"no case of {name} is served"


def large_experts(rows: int, act: DType, format: WeightFormat) -> Case[MoeExpertsFacts]:
    """Sizes that fill no tile."""
    facts = MoeExpertsFacts(6, 3, 328, 200, format, act)
    return experts_case(np.random.default_rng(rows), facts, rows)


@pytest.mark.gpu
@pytest.mark.parametrize(("act", "format"), [BF16, F16])
@pytest.mark.parametrize("rows", [4, 5, 15, 90, 400])  # pair by pair; then tiles of 16, 16, 64, 128 pairs
def test_experts_at_every_tile_size(gpu: Any, rows: int, act: DType, format: WeightFormat) -> None:
    (provider,) = (p for p in moe_experts.providers if p.kind is DeviceKind.cuda)
    assert check_provider(moe_experts, provider, large_experts(rows, act, format), gpu)


@pytest.mark.gpu
def test_rows_of_grouped_experts_are_independent_and_replay_in_a_graph(gpu: Any) -> None:
    case = large_experts(400, *BF16)
    launch: Any = bind(moe_experts, case.facts, gpu)
    weights = {
        name: case.arguments[name].for_device(case.facts, gpu, provider="cuda", launcher=launch)
        for name in ("gate_up", "down")
    }

    def run(rows: np.ndarray[Any, Any], *, in_graph: bool = False) -> np.ndarray[Any, Any]:
        names = ("x", "topk_ids", "topk_weights", "out")
        tensors = {name: gpu.from_numpy(case.arguments[name][rows].copy()) for name in names}
        if in_graph:
            gpu.stream.begin_capture()
            launch(**tensors, **weights)
            gpu.stream.end_capture().replay()
        else:
            launch(**tensors, **weights)
        result: np.ndarray[Any, Any] = gpu.to_numpy(tensors["out"])
        return result

    together = run(np.arange(400))
    assert np.array_equal(run(np.arange(400)[::-1]), together[::-1])
    for count in (5, 17, 33, 90, 250):
        rows = np.random.default_rng(count).permutation(400)[:count]
        assert np.array_equal(run(rows), together[rows])
        assert np.array_equal(run(rows, in_graph=True), together[rows])
