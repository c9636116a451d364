"""RMSNorm on a GPU."""

from __future__ import annotations

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []

_MAX_SIZE = 32768  # a row is held in the registers of one block


@rms_norm.provider("cuda", DeviceKind.cuda)
def _bind(facts: RmsNormFacts, device: Device) -> Launcher | None:
    if facts.size > _MAX_SIZE:
        return None
    gpu = cuda_device(device)
    vectors = -(-facts.size // (8 if facts.size % 8 == 0 else 1))
    threads = min(-(-vectors // 32) * 32, 1024)
    source = KernelSource.of(
        "norm/rms_norm.cu", SIZE=facts.size, THREADS=threads, **type_define("ACT", facts.act)
    )
    kernel = gpu.kernel(source, "rms_norm", signature="pppppf")
    stream = gpu.stream.handle

    def launch(*, x: Tensor, weight: Tensor, out: Tensor) -> None:
        kernel.launch(
            stream,
            (x.shape[0],),
            threads,
            x.data_ptr,
            x.strides[0],
            weight.data_ptr,
            out.data_ptr,
            out.strides[0],
            facts.eps,
        )

    return launch
