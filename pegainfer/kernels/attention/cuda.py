"""Paged attention on a GPU: tensor cores for 16-bit models, a plain kernel for everything else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["decode_source", "generic_source", "hopper_prefill_source", "prefill_source"]

_DECODE_WARPS, _DECODE_STAGES = 4, 3
_PREFILL_ROWS, _PREFILL_THREADS = 128, 256
_HOPPER_THREADS = 384
_HOPPER_SHARED = (
    1024 + 7 * 128 * 128 * 2 + 128
)  # alignment, three stages of keys and values, queries, barriers
_GENERIC_WARPS = 4
_MAX_GROUP = 16
_MAX_SHARES = 64  # as in decode.cu
_MAX_REQUESTS = 1024
_KEYS = 16


def _shape_defines(facts: AttentionFacts) -> dict[str, int]:
    return {
        "HEAD_DIM": facts.head_dim,
        "NUM_HEADS": facts.num_heads,
        "NUM_KV_HEADS": facts.num_kv_heads,
        "BLOCK_SIZE": facts.block_size,
        **type_define("ACT", facts.act),
        **type_define("KV", facts.kv_dtype),
    }


def generic_source(facts: AttentionFacts) -> KernelSource:
    """The kernel for any element type and head size."""
    return KernelSource.of("attention/generic.cu", **_shape_defines(facts))


def decode_source(facts: AttentionFacts) -> KernelSource:
    """The split-KV kernel for one token a request."""
    return KernelSource.of("attention/decode.cu", STAGES=_DECODE_STAGES, **_shape_defines(facts))


def prefill_source(facts: AttentionFacts) -> KernelSource:
    """The kernel for several tokens a request."""
    return KernelSource.of("attention/prefill.cu", **_shape_defines(facts))


def _divides_tile(block_size: int) -> bool:
    """Whether a tile of 128 keys is whole blocks, or a block whole tiles."""
    return 128 % block_size == 0 or block_size % 128 == 0


def hopper_prefill_source(facts: AttentionFacts) -> KernelSource:
    """The kernel for several tokens a request on Hopper, for heads of 128."""
    return KernelSource.of("attention/prefill_sm90.cu", **_shape_defines(facts))


def _bind_generic(facts: AttentionFacts, gpu: CudaDevice) -> Launcher:
    kernel = gpu.kernel(generic_source(facts), "paged_attention_generic", signature="ppppppppppif")
    stream = gpu.stream.handle

    def launch(
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        kernel.launch(
            stream,
            (q.shape[0], -(-facts.num_heads // _GENERIC_WARPS)),
            _GENERIC_WARPS * 32,
            q.data_ptr,
            q.strides[0],
            kv.data_ptr,
            kv_block_stride,
            block_tables.data_ptr,
            block_tables.strides[0],
            query_start_loc.data_ptr,
            seq_lens.data_ptr,
            out.data_ptr,
            out.strides[0],
            seq_lens.shape[0],
            facts.scale,
        )

    return launch


@paged_attention.provider("cuda", DeviceKind.cuda)
def _bind(facts: AttentionFacts, device: Device) -> Launcher | None:
    group = facts.num_heads // facts.num_kv_heads
    gpu = cuda_device(device)
    if facts.head_dim > 256:
        return None
    served = facts.head_dim in (64, 128, 256) and group <= _MAX_GROUP and facts.act is facts.kv_dtype
    if not served or facts.act is DType.float32:
        return _bind_generic(facts, gpu)
    tile_bytes = _KEYS * facts.head_dim * 2
    ring = _DECODE_WARPS * _DECODE_STAGES * 2 * tile_bytes
    merge = _DECODE_WARPS * group * facts.head_dim * 4  # the warps merge where the ring was
    decode = gpu.kernel(
        decode_source(facts),
        "paged_attention_decode",
        signature="pppppppppppf",
        shared_bytes=max(ring, merge),
    )
    if gpu.capability == (9, 0) and facts.head_dim == 128 and _divides_tile(facts.block_size):
        prefill_threads = _HOPPER_THREADS
        prefill = gpu.kernel(
            hopper_prefill_source(facts),
            "paged_attention_prefill_sm90",
            signature="ppppppppppif",
            shared_bytes=_HOPPER_SHARED,
        )
    else:
        prefill_threads = _PREFILL_THREADS
        prefill = gpu.kernel(
            prefill_source(facts),
            "paged_attention_prefill",
            signature="ppppppppppif",
            shared_bytes=2 * 2 * (2 if facts.head_dim > 128 else 4) * tile_bytes,
        )
    stream, scale_log2 = gpu.stream.handle, facts.scale * math.log2(math.e)
    target_blocks = 2 * gpu.num_multiprocessors
    share_bytes = group * (facts.head_dim + 2) * 4
    partial = gpu.workspace(
        "attention-partial", (target_blocks + _MAX_REQUESTS * facts.num_kv_heads) * share_bytes
    )
    arrivals = gpu.workspace("attention-arrivals", _MAX_REQUESTS * facts.num_kv_heads * 4)

    def launch(
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        num_requests = seq_lens.shape[0]
        if q.shape[0] == num_requests <= _MAX_REQUESTS:
            shares = min(max(target_blocks // (num_requests * facts.num_kv_heads), 1), _MAX_SHARES)
            decode.launch(
                stream,
                (num_requests, facts.num_kv_heads, shares),
                _DECODE_WARPS * 32,
                q.data_ptr,
                q.strides[0],
                kv.data_ptr,
                kv_block_stride,
                block_tables.data_ptr,
                block_tables.strides[0],
                seq_lens.data_ptr,
                out.data_ptr,
                out.strides[0],
                partial.data_ptr,
                arrivals.data_ptr,
                scale_log2,
            )
            return
        tiles = q.shape[0] * group // _PREFILL_ROWS + num_requests
        prefill.launch(
            stream,
            (tiles, facts.num_kv_heads),
            prefill_threads,
            q.data_ptr,
            q.strides[0],
            kv.data_ptr,
            kv_block_stride,
            block_tables.data_ptr,
            block_tables.strides[0],
            query_start_loc.data_ptr,
            seq_lens.data_ptr,
            out.data_ptr,
            out.strides[0],
            num_requests,
            scale_log2,
        )

    return launch
