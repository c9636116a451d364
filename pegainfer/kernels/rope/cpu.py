"""Rotary embedding and the write to the paged cache on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import address_of, kv_suffix, native_kernel, serves_kv
from pegainfer.ops.op import Launcher
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write
from pegainfer.runtime.cpu.stream import float_bits
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@qkv_rope_write.provider("native", DeviceKind.cpu)
def _bind(facts: QkvRopeFacts, device: Device) -> Launcher | None:
    if not serves_kv(facts.act, facts.kv_dtype, facts.head_dim, facts.block_size):
        return None
    kernel = native_kernel(device, f"pega_qkv_rope_write_{kv_suffix(facts.kv_dtype)}")
    if kernel is None:
        return None
    sizes = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.rotary_dim, facts.block_size)
    block_bytes, eps = facts.block_bytes, float_bits(facts.eps)

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
        kernel(
            qkv.data_ptr,
            qkv.strides[0],
            positions.data_ptr,
            slot_mapping.data_ptr,
            cos_sin.data_ptr,
            address_of(q_norm),
            address_of(k_norm),
            kv.data_ptr,
            kv_block_stride,
            (kv.nbytes - block_bytes) // kv_block_stride + 1,
            out.data_ptr,
            out.strides[0],
            qkv.shape[0],
            *sizes,
            cos_sin.shape[0],
            eps,
        )

    return launch
