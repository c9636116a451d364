"""Rows by index on a GPU."""

from __future__ import annotations

from collections.abc import Callable

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.gather import GatherRowsFacts, gather_rows
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["row_gatherer"]

_THREADS = 256


def row_gatherer(device: Device, *, size: int, act: DType) -> Callable[[int, int, int, Tensor, Tensor], None]:
    """A launch of `out[i] = table[indices[i]]`: (table address, row stride, rows, indices, out)."""
    gpu = cuda_device(device)
    source = KernelSource.of("gather/gather_rows.cu", SIZE=size, THREADS=_THREADS, **type_define("ACT", act))
    kernel = gpu.kernel(source, "gather_rows", signature="pppppp")
    stream = gpu.stream.handle

    def launch(table: int, stride: int, num_rows: int, indices: Tensor, out: Tensor) -> None:
        arguments = (table, stride, num_rows, indices.data_ptr, out.data_ptr, out.strides[0])
        kernel.launch(stream, (indices.shape[0],), _THREADS, *arguments)

    return launch


@gather_rows.provider("cuda", DeviceKind.cuda)
def _bind(facts: GatherRowsFacts, device: Device) -> Launcher | None:
    gather = row_gatherer(device, size=facts.size, act=facts.act)

    def launch(*, x: Tensor, indices: Tensor, out: Tensor) -> None:
        gather(x.data_ptr, x.strides[0], x.shape[0], indices, out)

    return launch
