"""What makes a GPU unusable, or too small, is one sentence that says what to do. A driver that answers as
told stands in for the real one: needs the CUDA packages, no GPU.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from pegainfer.engine import build
from pegainfer.engine.build import make_device
from pegainfer.errors import CapacityError, ConfigError
from pegainfer.runtime.cuda.device import DeviceStorage, PinnedStorage, make_cuda_device
from pegainfer.runtime.cuda.driver import check
from pegainfer.runtime.device import DeviceKind
from tests.models.worker_driver import engine_config

OK, OUT_OF_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
NO_DEVICE = cuda.CUresult.CUDA_ERROR_NO_DEVICE


@dataclass
class Machine:
    """What the driver says about a machine."""

    status: Any = OK
    version: int = 13000
    count: int = 1
    capability: tuple[int, int] = (9, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    told = Machine()

    def attribute(which: Any, device: Any) -> tuple[Any, int]:
        return OK, told.capability[which.name.endswith("MINOR")]

    answers = {
        "cuInit": lambda flags: (told.status,),
        "cuDriverGetVersion": lambda: (OK, told.version),
        "cuDeviceGetCount": lambda: (OK, told.count),
        "cuDeviceGet": lambda ordinal: (OK, ordinal),
        "cuDeviceGetAttribute": attribute,
        "cuDeviceGetName": lambda size, device: (OK, b"Tesla T4".ljust(size, b"\0")),
        "cuDevicePrimaryCtxRetain": lambda device: (OUT_OF_MEMORY, None),
        "cuMemAlloc": lambda nbytes: (OUT_OF_MEMORY, None),
        "cuMemHostAlloc": lambda nbytes, flags: (OUT_OF_MEMORY, None),
        "cuMemGetInfo": lambda: (OK, 3 << 29, 16 << 30),
        "cuGetErrorName": lambda status: (OK, status.name.encode()),
        "cuGetErrorString": lambda status: (OK, b"as the driver says"),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(cuda, name, answer)
    return told


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"status": NO_DEVICE}, r"driver cannot be used: CUDA_ERROR_NO_DEVICE.*; use --device cpu$"),
        ({"version": 12080}, r"too old: it speaks CUDA 12\.8, .* needs 13\.0 \(driver 580 or newer\)$"),
        ({"count": 0}, r"GPU 0 does not exist: the driver sees 0 \(CUDA_VISIBLE_DEVICES may hide some\)$"),
        (
            {"capability": (7, 5)},
            r"GPU 0 \(Tesla T4\) has compute capability 7\.5, pegainfer needs 8\.0 .*; use --device cpu$",
        ),
    ],
)
def test_a_gpu_that_cannot_be_used(machine: Machine, facts: dict[str, Any], words: str) -> None:
    for name, value in facts.items():
        setattr(machine, name, value)
    with pytest.raises(ConfigError, match=words) as refused:
        make_cuda_device()
    assert "\n" not in str(refused.value)


def test_auto_takes_the_cpu_instead_and_says_why(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Exists:
        def __init__(self, path: str) -> None:
            assert path == "/dev/nvidiactl"

        def exists(self) -> bool:
            return True

    machine.capability = (6, 1)
    monkeypatch.setattr(logging.getLogger("pegainfer"), "propagate", True)  # a command may have set it
    monkeypatch.setattr(build, "Path", Exists)
    device = make_device(engine_config(device="auto", num_threads=1))
    assert device.kind is DeviceKind.cpu
    assert "the GPU is not used: GPU 0 (Tesla T4) has compute capability 6.1" in caplog.text
    device.close()


def test_a_gpu_that_is_full_at_the_start(machine: Machine) -> None:
    with pytest.raises(CapacityError, match=r"out of memory \(CUDA_ERROR_OUT_OF_MEMORY.*\): end what else"):
        make_cuda_device()


def test_memory_that_is_not_there(machine: Machine) -> None:
    with pytest.raises(
        CapacityError,
        match=r"no room for another 2\.25 GiB, 1\.50 GiB of 16\.00 GiB are free: .*--gpu-memory-utilization",
    ):
        DeviceStorage(9 << 28)
    with pytest.raises(CapacityError, match=r"host cannot lock 2\.00 GiB .*--max-num-seqs"):
        PinnedStorage(2 << 30)
    with pytest.raises(CapacityError, match="end what else uses it"):
        check((OUT_OF_MEMORY,))
