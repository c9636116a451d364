"""Paged attention on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import kv_suffix, native_kernel, serves_kv
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cpu.stream import float_bits
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@paged_attention.provider("native", DeviceKind.cpu)
def _bind(facts: AttentionFacts, device: Device) -> Launcher | None:
    if not serves_kv(facts.act, facts.kv_dtype, facts.head_dim, facts.block_size):
        return None
    kernel = native_kernel(device, f"pega_paged_attention_{kv_suffix(facts.kv_dtype)}")
    if kernel is None:
        return None
    sizes = (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.block_size, float_bits(facts.scale))
    part = 2 * facts.num_kv_heads * facts.block_size * facts.head_dim * facts.kv_dtype.itemsize

    def launch(
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_decodes: int,
        out: Tensor,
    ) -> None:
        kernel(
            q.data_ptr,
            q.strides[0],
            kv.data_ptr,
            kv_block_stride,
            (kv.nbytes - part) // kv_block_stride + 1,
            block_tables.data_ptr,
            block_tables.strides[0],
            query_start_loc.data_ptr,
            seq_lens.data_ptr,
            seq_lens.shape[0],
            out.data_ptr,
            out.strides[0],
            *sizes,
        )

    return launch
