"""Head norm, rotation and the write of keys and values on a GPU, in one kernel."""

from __future__ import annotations

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.op import Launcher
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []

_WARPS = 8


@qkv_rope_write.provider("cuda", DeviceKind.cuda)
def _bind(facts: QkvRopeFacts, device: Device) -> Launcher | None:
    half = facts.head_dim // 2
    if facts.rotary_dim != facts.head_dim or facts.head_dim % 2 or (half > 32 and half % 32) or half > 128:
        return None
    gpu = cuda_device(device)
    source = KernelSource.of(
        "rope/qkv_rope_write.cu",
        HEAD_DIM=facts.head_dim,
        NUM_HEADS=facts.num_heads,
        NUM_KV_HEADS=facts.num_kv_heads,
        BLOCK_SIZE=facts.block_size,
        QK_NORM=int(facts.qk_norm),
        WARPS=_WARPS,
        **type_define("ACT", facts.act),
        **type_define("KV", facts.kv_dtype),
    )
    kernel = gpu.kernel(source, "qkv_rope_write", signature="pppppppppppf")
    stream = gpu.stream.handle
    lanes = 32 if half < 32 else 16  # of a head
    blocks = -(-(facts.num_heads + 2 * facts.num_kv_heads) * lanes // (_WARPS * 32))

    def launch(
        *,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        kv: Tensor,
        kv_block_stride: int,
        out: Tensor,
    ) -> None:
        kernel.launch(
            stream,
            (qkv.shape[0], blocks),
            _WARPS * 32,
            qkv.data_ptr,
            qkv.strides[0],
            positions.data_ptr,
            slot_mapping.data_ptr,
            cos_sin.data_ptr,
            q_norm.data_ptr if q_norm else 0,
            k_norm.data_ptr if k_norm else 0,
            kv.data_ptr,
            kv_block_stride,
            out.data_ptr,
            out.strides[0],
            facts.eps,
        )

    return launch
