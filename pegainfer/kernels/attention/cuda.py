"""Paged attention on a GPU: tensor cores for 16-bit models, a plain kernel for everything else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.decode_attention import DecodeAttentionFacts, decode_attention
from pegainfer.ops.op import Launcher
from pegainfer.ops.rope import QkvRopeFacts
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["decode_source", "generic_source", "hopper_prefill_source", "prefill_source"]

_WIDE, _NARROW = ((8, 3), (4, 3), (4, 2), (2, 2)), ((4, 3), (4, 2), (2, 2), (1, 2))
"""Warps and ring stages of decode.cu, the best first: with a multiprocessor for each block, and without."""
_PREFILL_ROWS, _PREFILL_THREADS = 128, 256
_HOPPER_THREADS = 384
_HOPPER_SHARED = (
    1024 + 7 * 128 * 128 * 2 + 128
)  # alignment, three stages of keys and values, queries, barriers
_PREFILL_KEYS = 128  # a tile of prefill_sm90.cu
_BOX_COLUMNS = 64  # 128 bytes: the swizzle's rows
_GENERIC_WARPS = 4
_MAX_GROUP = 16
_MAX_SHARES = 64  # as in decode.cu
_MAX_PREFILL_SHARES = 32  # a lane each
_MAX_REQUESTS = 1024
_KEYS = 16
_STATIC_SHARED = 8 << 10  # room for what the kernel declares itself


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


def decode_source(
    facts: AttentionFacts, warps: int, stages: int, rope: QkvRopeFacts | None = None
) -> KernelSource:
    """The split-KV kernel for one token a request, with `rope` from merged projections."""
    return KernelSource.of(
        "attention/decode.cu",
        WARPS=warps,
        STAGES=stages,
        ROPE=int(rope is not None),
        QK_NORM=int(rope is not None and rope.qk_norm),
        **_shape_defines(facts),
    )


def prefill_source(facts: AttentionFacts) -> KernelSource:
    """The kernel for several tokens a request."""
    return KernelSource.of("attention/prefill.cu", **_shape_defines(facts))


def _divides_tile(block_size: int) -> bool:
    """Whether a tile of 128 keys is whole blocks, or a block whole tiles."""
    return 128 % block_size == 0 or block_size % 128 == 0


def hopper_prefill_source(facts: AttentionFacts, *, split: bool) -> KernelSource:
    """The kernel for several tokens a request on Hopper, for heads of 128."""
    return KernelSource.of("attention/prefill_sm90.cu", SPLIT=int(split), **_shape_defines(facts))


_Prefill = Callable[..., None]
"""Attention of `num_tokens` tokens: the requests' part of `query_start_loc` leads into all of `q`."""


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
        num_decodes: int,
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


def _bind_prefill(facts: AttentionFacts, gpu: CudaDevice) -> _Prefill:
    group = facts.num_heads // facts.num_kv_heads
    kernel = gpu.kernel(
        prefill_source(facts),
        "paged_attention_prefill",
        signature="ppppppppppif",
        shared_bytes=2 * 2 * (2 if facts.head_dim > 128 else 4) * _KEYS * facts.head_dim * 2,
    )
    stream, scale_log2 = gpu.stream.handle, facts.scale * math.log2(math.e)

    def launch(
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_tokens: int,
        out: Tensor,
    ) -> None:
        num_requests = seq_lens.shape[0]
        kernel.launch(
            stream,
            (num_tokens * group // _PREFILL_ROWS + num_requests, facts.num_kv_heads),
            _PREFILL_THREADS,
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


def _bind_hopper_prefill(facts: AttentionFacts, gpu: CudaDevice) -> _Prefill | None:
    if gpu.capability != (9, 0) or facts.head_dim != 128 or not _divides_tile(facts.block_size):
        return None
    group, width, row_bytes = facts.num_heads // facts.num_kv_heads, facts.head_dim, facts.head_dim * 2
    whole, split = (
        gpu.kernel(
            hopper_prefill_source(facts, split=split),
            "paged_attention_prefill_sm90",
            signature="mppppppppppppif",
            shared_bytes=_HOPPER_SHARED,
        )
        for split in (False, True)
    )
    stream, scale_log2 = gpu.stream.handle, facts.scale * math.log2(math.e)
    # Keys are shared among blocks only while there are fewer blocks than multiprocessors.
    num_places = gpu.num_multiprocessors
    partial = gpu.workspace(
        "attention-prefill-partial", num_places * _PREFILL_ROWS * (facts.head_dim + 2) * 4
    )
    arrivals = gpu.workspace("attention-prefill-arrivals", num_places * 4)

    def launch(
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        num_tokens: int,
        out: Tensor,
    ) -> None:
        num_requests = seq_lens.shape[0]
        tiles = num_tokens * group // _PREFILL_ROWS + num_requests
        shares = min(max(num_places // (tiles * facts.num_kv_heads), 1), _MAX_PREFILL_SHARES)
        kernel = whole if shares == 1 else split
        boxes = gpu.tensor_map(
            kv,
            facts.kv_dtype,
            sizes=(width, facts.block_size, 2 * facts.num_kv_heads, -(-kv.nbytes // kv_block_stride)),
            strides=(row_bytes, facts.block_size * row_bytes, kv_block_stride),
            box=(_BOX_COLUMNS, min(facts.block_size, _PREFILL_KEYS), 1, 1),
        )
        kernel.launch(
            stream,
            (tiles, facts.num_kv_heads, shares),
            _HOPPER_THREADS,
            boxes,
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
            partial.data_ptr,
            arrivals.data_ptr,
            num_requests,
            scale_log2,
        )

    return launch


class _DecodeKernel:
    """The split-KV kernel with the first of `shapes` that fits into shared memory."""

    def __init__(
        self,
        facts: AttentionFacts,
        rope: QkvRopeFacts | None,
        gpu: CudaDevice,
        shapes: tuple[tuple[int, int], ...],
        max_shares: int,
    ) -> None:
        group = facts.num_heads // facts.num_kv_heads
        for warps, stages in shapes:
            ring = warps * stages * 2 * _KEYS * facts.head_dim * 2
            merge = warps * group * facts.head_dim * 4  # the warps merge where the ring was
            if max(ring, merge) + _STATIC_SHARED <= gpu.max_shared_bytes:
                break
        self.threads = warps * 32
        self.max_shares = max_shares
        self.kernel = gpu.kernel(
            decode_source(facts, warps, stages, rope),
            "paged_attention_decode",
            signature="pp" + ("ppppf" if rope else "") + "pppppppppf",
            shared_bytes=max(ring, merge),
        )


class _Decode:
    """One token a request: the wide or the narrow kernel."""

    def __init__(self, facts: AttentionFacts, gpu: CudaDevice, rope: QkvRopeFacts | None = None) -> None:
        self._facts = facts
        self._stream = gpu.stream.handle
        self._scale_log2 = facts.scale * math.log2(math.e)
        self._wide = _DecodeKernel(facts, rope, gpu, _WIDE, _MAX_SHARES)
        self._narrow = _DecodeKernel(facts, rope, gpu, _NARROW, 1)
        places = _MAX_REQUESTS * facts.num_kv_heads
        share_bytes = facts.num_heads // facts.num_kv_heads * (facts.head_dim + 2) * 4
        self._num_multiprocessors = gpu.num_multiprocessors
        self._partial = gpu.workspace("attention-partial", (gpu.num_multiprocessors + places) * share_bytes)
        self._arrivals = gpu.workspace("attention-arrivals", places * 4)

    def launch(
        self,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        out: Tensor,
        *rope: int | float,
    ) -> None:
        """Enqueue; `rope` are the arguments of that variant."""
        blocks = seq_lens.shape[0] * self._facts.num_kv_heads
        chosen = self._wide if blocks <= self._num_multiprocessors else self._narrow
        shares = min(max(self._num_multiprocessors // blocks, 1), chosen.max_shares)
        chosen.kernel.launch(
            self._stream,
            (seq_lens.shape[0], self._facts.num_kv_heads, shares),
            chosen.threads,
            q.data_ptr,
            q.strides[0],
            *rope,
            kv.data_ptr,
            kv_block_stride,
            block_tables.data_ptr,
            block_tables.strides[0],
            seq_lens.data_ptr,
            out.data_ptr,
            out.strides[0],
            self._partial.data_ptr,
            self._arrivals.data_ptr,
            self._scale_log2,
        )


def _has_kernels(facts: AttentionFacts) -> bool:
    """Whether the tensor-core kernels serve these facts."""
    group = facts.num_heads // facts.num_kv_heads
    served = facts.head_dim in (64, 128, 256) and group <= _MAX_GROUP
    return served and facts.act is facts.kv_dtype and facts.act is not DType.float32


@paged_attention.provider("cuda", DeviceKind.cuda)
def _bind(facts: AttentionFacts, device: Device) -> Launcher | None:
    gpu = cuda_device(device)
    if facts.head_dim > 256:
        return None
    if not _has_kernels(facts):
        return _bind_generic(facts, gpu)
    prefill = _bind_hopper_prefill(facts, gpu) or _bind_prefill(facts, gpu)
    decode = _Decode(facts, gpu)

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
        count, total = min(num_decodes, _MAX_REQUESTS), seq_lens.shape[0]
        if count:
            decode.launch(q, kv, kv_block_stride, block_tables.rows(count), seq_lens.rows(count), out)
        if count < total:
            prefill(
                q=q,
                kv=kv,
                kv_block_stride=kv_block_stride,
                block_tables=block_tables.slice(0, count, total),
                query_start_loc=query_start_loc.slice(0, count, total + 1),
                seq_lens=seq_lens.slice(0, count, total),
                num_tokens=q.shape[0] - count,
                out=out,
            )

    return launch


class CudaDecodeAttention:
    """The launcher of the op `decode_attention`."""

    max_requests = _MAX_REQUESTS

    def __init__(self, facts: DecodeAttentionFacts, gpu: CudaDevice) -> None:
        self._eps = facts.rope.eps
        self._decode = _Decode(facts.attention, gpu, facts.rope)

    def __call__(
        self,
        *,
        qkv: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        cos_sin: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        """Enqueue it for at most `max_requests`."""
        self._decode.launch(
            qkv,
            kv,
            kv_block_stride,
            block_tables,
            seq_lens,
            out,
            slot_mapping.data_ptr,
            cos_sin.data_ptr,
            q_norm.data_ptr if q_norm else 0,
            k_norm.data_ptr if k_norm else 0,
            self._eps,
        )


@decode_attention.provider("cuda", DeviceKind.cuda)
def _bind_decode(facts: DecodeAttentionFacts, device: Device) -> Launcher | None:
    is_whole = facts.rope.rotary_dim == facts.rope.head_dim
    if not is_whole or not _has_kernels(facts.attention):
        return None
    return CudaDecodeAttention(facts, cuda_device(device))
