"""Every provider of the CPU against the reference of its op, on every case, at every instruction set level
that this machine runs. A provider is tested by being registered.
"""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.kernels import FAMILIES, load_providers
from pegainfer.ops.op import all_ops
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.device import DeviceKind
from tests.ops.native import LEVELS, device_of
from tests.ops.parity import check_provider

load_providers(DeviceKind.cpu)

OPS = all_ops()
FUSIONS = {"norm_linear", "decode_attention"}  # the CPU launches their parts
_NATIVE = [(op, level) for op in OPS if op not in FUSIONS for level in LEVELS]


def test_every_family_has_an_op_with_compiled_kernels() -> None:
    native = {op.name for op in OPS.values() if any(p.name == "native" for p in op.providers)}
    assert len(native) >= len(FAMILIES)
    assert native == set(OPS) - FUSIONS


def test_this_machine_tests_a_compiled_level() -> None:
    assert "portable" in LEVELS


@pytest.mark.parametrize(("name", "level"), _NATIVE, ids=[f"{op}-{level}" for op, level in _NATIVE])
def test_compiled_kernels(name: str, level: str) -> None:
    op, served = OPS[name], 0
    provider = next(p for p in op.providers if p.kind is DeviceKind.cpu and p.name == "native")
    for case in op.cases(np.random.default_rng(7)):
        served += check_provider(op, provider, case, device_of(level, 2))
    assert served, f"no case of {name} is served"


@pytest.mark.parametrize("name", OPS)
def test_numpy_fallback(name: str) -> None:
    op, device = OPS[name], CpuDevice(None, 1)
    provider = next(p for p in op.providers if p.kind is DeviceKind.cpu and p.name == "numpy")
    for case in op.cases(np.random.default_rng(7)):
        assert check_provider(op, provider, case, device)
