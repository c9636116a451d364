"""The CUDA driver API with errors as exceptions. Knows nothing of tensors or kernels.

Importing this module needs `cuda.bindings`; calling it needs a driver. Both are checked by `initialize`,
which turns what is missing into one sentence.
"""

from __future__ import annotations

from typing import Any

from pegainfer.errors import CapacityError, ConfigError, KernelError

__all__ = [
    "MINIMUM_CAPABILITY",
    "MINIMUM_DRIVER",
    "allocate",
    "allocate_pinned",
    "attribute",
    "check",
    "cuda",
    "initialize",
]

MINIMUM_DRIVER = 13000
"""Driver API version that the kernels are built for (CUDA 13.0, drivers from 580 on)."""

MINIMUM_CAPABILITY = (8, 0)
"""What the kernels ask of a GPU: asynchronous copies and bfloat16 matrix units (Ampere)."""

_RELIEF = "end what else uses it, lower --gpu-memory-utilization, or take a smaller or quantised model"

try:
    from cuda.bindings import driver as cuda
except ImportError as error:  # pragma: no cover - depends on the installation
    raise ConfigError(
        "the CUDA device needs the cuda extra, pip install 'pegainfer[cuda]': "
        f"importing cuda.bindings failed ({error})"
    ) from None


def check(result: tuple[Any, ...]) -> Any:
    """Unpack what a driver call returned; raises `CapacityError` when memory ran out, else `KernelError`."""
    status, *values = result
    if status != cuda.CUresult.CUDA_SUCCESS:
        message = _describe(status)
        if status == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise CapacityError(f"the GPU is out of memory ({message}): {_RELIEF}")
        raise KernelError(f"CUDA driver: {message}")
    return values[0] if len(values) == 1 else tuple(values)


def initialize(ordinal: int) -> Any:
    """Start the driver and return the `CUdevice`; raises `ConfigError` when there is no usable GPU."""
    try:
        status = cuda.cuInit(0)[0]
    except RuntimeError as error:  # libcuda is not there
        raise ConfigError(f"no NVIDIA driver was found ({error}); use --device cpu") from None
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise ConfigError(f"the NVIDIA driver cannot be used: {_describe(status)}; use --device cpu")
    version = check(cuda.cuDriverGetVersion())
    if version < MINIMUM_DRIVER:
        raise ConfigError(
            f"the NVIDIA driver is too old: it speaks CUDA {version // 1000}.{version % 1000 // 10}, "
            f"pegainfer needs {MINIMUM_DRIVER // 1000}.{MINIMUM_DRIVER % 1000 // 10} (driver 580 or newer)"
        )
    count = check(cuda.cuDeviceGetCount())
    if ordinal >= count:
        raise ConfigError(
            f"GPU {ordinal} does not exist: the driver sees {count} (CUDA_VISIBLE_DEVICES may hide some)"
        )
    device = check(cuda.cuDeviceGet(ordinal))
    capability = tuple(attribute(device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
    if capability < MINIMUM_CAPABILITY:
        name = check(cuda.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
        has, needed = (".".join(map(str, version)) for version in (capability, MINIMUM_CAPABILITY))
        raise ConfigError(
            f"GPU {ordinal} ({name}) has compute capability {has}, pegainfer needs {needed} or higher "
            "(Ampere or newer); use --device cpu"
        )
    return device


def allocate(nbytes: int) -> int:
    """The address of new device memory; raises `CapacityError` with what is free when there is not enough."""
    result = cuda.cuMemAlloc(max(nbytes, 1))
    if result[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        free, total = check(cuda.cuMemGetInfo())
        raise CapacityError(
            f"the GPU has no room for another {_gib(nbytes)}, {_gib(free)} of {_gib(total)} are free: "
            f"{_RELIEF}"
        )
    return int(check(result))


def allocate_pinned(nbytes: int) -> int:
    """The address of new page-locked host memory; raises `CapacityError` when the host has not enough."""
    result = cuda.cuMemHostAlloc(max(nbytes, 1), 0)
    if result[0] == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise CapacityError(
            f"the host cannot lock {_gib(nbytes)} of memory for the GPU: end other programs, or lower "
            "--max-num-seqs or --max-num-batched-tokens"
        )
    return int(check(result))


def attribute(device: Any, name: str) -> int:
    """The value of `CU_DEVICE_ATTRIBUTE_<name>`."""
    number = getattr(cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(check(cuda.cuDeviceGetAttribute(number, device)))


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _describe(status: Any) -> str:
    """The driver's own name and explanation of an error."""
    name, text = cuda.cuGetErrorName(status)[1], cuda.cuGetErrorString(status)[1]
    return f"{(name or b'?').decode()}: {(text or b'?').decode()}"
