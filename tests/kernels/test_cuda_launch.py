"""The launch path over a driver that only takes notes: needs the CUDA packages, no GPU."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import pytest
from cuda.bindings import driver as cuda

from pegainfer.errors import KernelError
from pegainfer.runtime.cuda.launch import Kernel

_OK = cuda.CUresult.CUDA_SUCCESS
FUNCTION, STREAM = cuda.CUfunction(0x10), cuda.CUstream(0x20)


class Driver:
    """Keeps the argument slots and the configuration of every launch, as the driver does during the call."""

    def __init__(self, num_arguments: int) -> None:
        self.num_arguments = num_arguments
        self.status = _OK
        self.launches: list[tuple[tuple[int, ...], list[bytes]]] = []

    def launch(self, config: Any, function: Any, params: int, extra: int) -> tuple[Any, ...]:
        assert function is FUNCTION
        table = (ctypes.c_void_p * self.num_arguments).from_address(params)
        sizes = (config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, int(config.hStream))
        self.launches.append((sizes, [ctypes.string_at(address, 8) for address in table]))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Stands in for the driver; the kernel has the signature `pif`."""
    noted = Driver(3)
    monkeypatch.setattr(cuda, "cuModuleGetFunction", lambda module, name: (_OK, FUNCTION))
    monkeypatch.setattr(cuda, "cuFuncSetAttribute", lambda function, attribute, value: (_OK,))
    monkeypatch.setattr(cuda, "cuLaunchKernelEx", noted.launch)
    monkeypatch.setattr(cuda, "cuGetErrorName", lambda status: (_OK, status.name.encode()))
    monkeypatch.setattr(cuda, "cuGetErrorString", lambda status: (_OK, b"so it is"))
    return noted


def test_a_launch_hands_over_sizes_and_arguments(driver: Driver) -> None:
    kernel = Kernel(None, "scale", signature="pif")
    kernel.launch(STREAM, (7,), 64, 1 << 40, -3, 0.5)
    kernel.launch(STREAM, (7, 2, 3), 32, 5, 6, 1.5)
    assert driver.launches == [
        (
            (7, 1, 1, 64, 0x20),
            [struct.pack("<q", 1 << 40), struct.pack("<i4x", -3), struct.pack("<f4x", 0.5)],
        ),
        ((7, 2, 3, 32, 0x20), [struct.pack("<q", 5), struct.pack("<i4x", 6), struct.pack("<f4x", 1.5)]),
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((1, 2), "scale takes 3 arguments, got 2"),
        ((1, 2**31, 0.5), "argument 1 of scale cannot be 2147483648"),
        ((1, 2, 1e300), "argument 2 of scale cannot be 1e"),
    ],
)
def test_what_does_not_fit_its_slot_is_not_launched(
    driver: Driver, arguments: tuple[int | float, ...], complaint: str
) -> None:
    kernel = Kernel(None, "scale", signature="pif")
    with pytest.raises(KernelError, match=complaint):
        kernel.launch(STREAM, (1,), 32, *arguments)
    assert driver.launches == []


def test_a_launch_that_the_driver_refuses_says_why(driver: Driver) -> None:
    kernel = Kernel(None, "scale", signature="pif")
    driver.status = cuda.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(KernelError, match="CUDA_ERROR_INVALID_VALUE: so it is"):
        kernel.launch(STREAM, (1,), 32, 1, 2, 3.0)
