"""SwiGLU on a GPU."""

from __future__ import annotations

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.activation import SiluAndMulFacts, silu_and_mul
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []

_THREADS = 128
_PER_THREAD = 2


@silu_and_mul.provider("cuda", DeviceKind.cuda)
def _bind(facts: SiluAndMulFacts, device: Device) -> Launcher | None:
    gpu = cuda_device(device)
    source = KernelSource.of(
        "activation/silu_and_mul.cu",
        SIZE=facts.size,
        THREADS=_THREADS,
        PER_THREAD=_PER_THREAD,
        **type_define("ACT", facts.act),
    )
    kernel = gpu.kernel(source, "silu_and_mul", signature="pppp")
    stream = gpu.stream.handle
    columns = -(-facts.size // (_THREADS * _PER_THREAD * (8 if facts.size % 8 == 0 else 1)))

    def launch(*, gate_up: Tensor, out: Tensor) -> None:
        grid = (out.shape[0], columns)
        kernel.launch(
            stream, grid, _THREADS, gate_up.data_ptr, gate_up.strides[0], out.data_ptr, out.strides[0]
        )

    return launch
