"""What of the CUDA device works without a GPU: packed arguments, clear refusals, keeping out of the way."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys

import pytest

from pegainfer.errors import ConfigError, KernelError
from pegainfer.runtime.cuda.arguments import Arguments
from pegainfer.runtime.cuda.device import make_cuda_device


def slots(arguments: Arguments, count: int) -> list[bytes]:
    """The bytes at the addresses that the driver is given."""
    table = (ctypes.c_void_p * count).from_address(arguments.address)
    return [ctypes.string_at(address, 8) for address in table]


def test_arguments_lie_where_the_table_says() -> None:
    arguments = Arguments("kernel", "pifp")
    arguments.pack((0x7F0012345678, -3, 0.1, -1))
    assert slots(arguments, 4) == [
        struct.pack("<q", 0x7F0012345678),
        struct.pack("<i", -3) + bytes(4),
        struct.pack("<f", 0.1) + bytes(4),
        struct.pack("<q", -1),
    ]
    address = arguments.address
    arguments.pack((1, 2, 3, 4))  # an int where a float belongs is a float
    assert arguments.address == address
    assert slots(arguments, 4)[2] == struct.pack("<f", 3.0) + bytes(4)


def test_a_kernel_may_take_nothing() -> None:
    Arguments("kernel", "").pack(())


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ((1,), "scale takes 2 arguments, got 1"),
        ((1, 2, 3), "scale takes 2 arguments, got 3"),
        ((1, 2**31), "argument 1 of scale cannot be 2147483648"),
        ((1, 0.5), "argument 1 of scale cannot be 0.5"),
        ((2**63, 1), "argument 0 of scale cannot be 9223372036854775808"),
        ((None, 1), "argument 0 of scale cannot be None"),
    ],
)
def test_wrong_arguments_are_refused(values: tuple[int, ...], complaint: str) -> None:
    with pytest.raises(KernelError, match=complaint):
        Arguments("scale", "pi").pack(values)


def test_a_float_that_is_too_large_is_refused() -> None:
    with pytest.raises(KernelError, match="argument 0 of scale"):
        Arguments("scale", "f").pack((1e300,))


def test_a_gpu_that_is_not_there_is_one_sentence() -> None:
    with pytest.raises(ConfigError) as refused:
        make_cuda_device(99)
    message = str(refused.value)
    assert "\n" not in message
    assert "--device cpu" in message or "GPU 99 does not exist" in message


def test_providers_bind_and_the_cpu_runs_without_the_cuda_packages() -> None:
    program = """
import sys
sys.modules["cuda"] = None
sys.path.insert(0, ".")
from pegainfer.runtime.cpu import make_cpu_device
from tests.kernels.planned import sources_of_model
make_cpu_device(1).close()
assert sources_of_model("Qwen3-30B-A3B", "sm_90a")
try:
    import pegainfer.runtime.cuda.device
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ConfigError the CUDA device needs the cuda extra")
    assert done.stdout.count("\n") == 1
