"""What the providers of compiled CPU kernels share: the way to a kernel of the device's library."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cpu.device import CpuDevice

__all__ = ["address_of", "kv_suffix", "native_kernel", "serves_kv"]

_KV_SUFFIX = {DType.float32: "f32", DType.float16: "f16", DType.bfloat16: "bf16"}
_TILE_SLOTS = 16
_MAX_HEAD_DIM = 512


def native_kernel(device: Device, name: str) -> Callable[..., None] | None:
    """A function that enqueues the kernel with its arguments (64-bit words); None if nothing is compiled."""
    cpu = cast("CpuDevice", device)
    if cpu.library is None:
        return None
    address, launch = cpu.library.address(name), cpu.stream.launch

    def enqueue(*words: int) -> None:
        launch(address, words)

    return enqueue


def address_of(tensor: Tensor | None) -> int:
    """The address of the first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr


def serves_kv(act: DType, kv_dtype: DType, head_dim: int, block_size: int) -> bool:
    """Whether the compiled kernels know a cache layout for these. Who writes the cache and who reads it must
    agree, so both ask here.
    """
    return (
        act is DType.float32
        and kv_dtype in _KV_SUFFIX
        and head_dim % _TILE_SLOTS == 0
        and head_dim <= _MAX_HEAD_DIM
        and block_size % _TILE_SLOTS == 0
    )


def kv_suffix(kv_dtype: DType) -> str:
    """How the kernels for a cache's element type end."""
    return _KV_SUFFIX[kv_dtype]
