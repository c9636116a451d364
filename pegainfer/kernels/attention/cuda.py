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


def decode_source(facts: AttentionFacts, warps: int, stages: int) -> KernelSource:
    """The split-KV kernel for one token a request."""
    return KernelSource.of("attention/decode.cu", WARPS=warps, STAGES=stages, **_shape_defines(facts))


def prefill_source(facts: AttentionFacts) -> KernelSource:
    """The kernel for several tokens a request."""
    return KernelSource.of("attention/prefill.cu", **_shape_defines(facts))


def _divides_tile(block_size: int) -> bool:
    """Whether a tile of 128 keys is whole blocks, or a block whole tiles."""
    return 128 % block_size == 0 or block_size % 128 == 0


def hopper_prefill_source(facts: AttentionFacts, *, split: bool) -> KernelSource:
    """The kernel for several tokens a request on Hopper, for heads of 128."""
    return KernelSource.of("attention/prefill_sm90.cu", SPLIT=int(split), **_shape_defines(facts))


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


def _bind_prefill(facts: AttentionFacts, gpu: CudaDevice) -> Launcher:
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
        out: Tensor,
    ) -> None:
        num_requests = seq_lens.shape[0]
        kernel.launch(
            stream,
            (q.shape[0] * group // _PREFILL_ROWS + num_requests, facts.num_kv_heads),
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


def _bind_hopper_prefill(facts: AttentionFacts, gpu: CudaDevice) -> Launcher | None:
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
        out: Tensor,
    ) -> None:
        num_requests = seq_lens.shape[0]
        tiles = q.shape[0] * group // _PREFILL_ROWS + num_requests
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


class _Decode:
    """One token a request: the split-KV kernel with the first of `shapes` that fits into shared memory."""

    def __init__(
        self, facts: AttentionFacts, gpu: CudaDevice, shapes: tuple[tuple[int, int], ...], max_shares: int
    ) -> None:
        group = facts.num_heads // facts.num_kv_heads
        self._stream = gpu.stream.handle
        self._facts = facts
        self._scale_log2 = facts.scale * math.log2(math.e)
        for warps, stages in shapes:
            ring = warps * stages * 2 * _KEYS * facts.head_dim * 2
            merge = warps * group * facts.head_dim * 4  # the warps merge where the ring was
            if max(ring, merge) + _STATIC_SHARED <= gpu.max_shared_bytes:
                break
        self._threads = warps * 32
        self._kernel = gpu.kernel(
            decode_source(facts, warps, stages),
            "paged_attention_decode",
            signature="pppppppppppf",
            shared_bytes=max(ring, merge),
        )
        places = _MAX_REQUESTS * facts.num_kv_heads
        share_bytes = group * (facts.head_dim + 2) * 4
        self._num_multiprocessors = gpu.num_multiprocessors
        self._max_shares = max_shares
        self._partial = gpu.workspace("attention-partial", (gpu.num_multiprocessors + places) * share_bytes)
        self._arrivals = gpu.workspace("attention-arrivals", places * 4)

    def __call__(
        self,
        *,
        q: Tensor,
        kv: Tensor,
        kv_block_stride: int,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        out: Tensor,
    ) -> None:
        num_requests, num_kv_heads = seq_lens.shape[0], self._facts.num_kv_heads
        shares = min(max(self._num_multiprocessors // (num_requests * num_kv_heads), 1), self._max_shares)
        self._kernel.launch(
            self._stream,
            (num_requests, num_kv_heads, shares),
            self._threads,
            q.data_ptr,
            q.strides[0],
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


@paged_attention.provider("cuda", DeviceKind.cuda)
def _bind(facts: AttentionFacts, device: Device) -> Launcher | None:
    group = facts.num_heads // facts.num_kv_heads
    gpu = cuda_device(device)
    if facts.head_dim > 256:
        return None
    served = facts.head_dim in (64, 128, 256) and group <= _MAX_GROUP and facts.act is facts.kv_dtype
    if not served or facts.act is DType.float32:
        return _bind_generic(facts, gpu)
    prefill = _bind_hopper_prefill(facts, gpu) or _bind_prefill(facts, gpu)
    wide, narrow = _Decode(facts, gpu, _WIDE, _MAX_SHARES), _Decode(facts, gpu, _NARROW, 1)

    def launch(**arguments: Tensor | int) -> None:
        q, seq_lens = arguments["q"], arguments["seq_lens"]
        assert isinstance(q, Tensor)
        assert isinstance(seq_lens, Tensor)
        num_requests = seq_lens.shape[0]
        chosen: Launcher = prefill
        if q.shape[0] == num_requests <= _MAX_REQUESTS:
            fits = num_requests * facts.num_kv_heads <= gpu.num_multiprocessors
            chosen = wide if fits else narrow
        chosen(**arguments)

    return launch
