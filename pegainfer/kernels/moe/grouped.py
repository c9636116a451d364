"""Many tokens' experts on a GPU: pairs sorted by expert, two grouped products on tensor cores, one sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import type_define
from pegainfer.ops.moe import MoeExpertsFacts
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice
    from pegainfer.runtime.cuda.launch import Kernel

__all__ = ["GroupedExperts"]

_THREADS = 256
_SORT_THREADS = 1024
_SUM_THREADS = 128
_MAX_EXPERTS = 1024  # three tables in shared memory
_WEIGHT_ROWS = 128  # a block's, as in grouped_gemm.cu
_ROW_BYTES = 128  # of a stage
_TILE_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Tile:
    """A size of `grouped_gemm.cu`; taken while an expert has up to `mean_pairs` pairs on average."""

    rows: int
    stages: int
    mean_pairs: float


_TILES = (_Tile(16, 4, 8), _Tile(64, 4, 48), _Tile(128, 3, float("inf")))


class GroupedExperts:
    """`out += sum over a token's slots` for steps in which experts have several tokens each.

    `activated` is scratch of `max_tokens * top_k` rows of `intermediate_size`.
    """

    def __init__(
        self, facts: MoeExpertsFacts, gpu: CudaDevice, *, max_tokens: int, activated: Tensor
    ) -> None:
        self._facts = facts
        self._stream = gpu.stream.handle
        self._activated = activated
        sizes = {"HIDDEN": facts.hidden_size, "TOP_K": facts.top_k}
        act = type_define("ACT", facts.act)
        sort = KernelSource.of(
            "moe/sort_slots.cu",
            NUM_EXPERTS=facts.num_experts,
            TOP_K=facts.top_k,
            THREADS=_SORT_THREADS,
            **act,
        )
        self._sort = gpu.kernel(sort, "sort_slots", signature="ppppiii")
        total = KernelSource.of("moe/sum_slots.cu", THREADS=_SUM_THREADS, **sizes, **act)
        self._sum = gpu.kernel(total, "sum_slots", signature="ppp")

        def product(tile: _Tile, gated: int) -> Kernel:
            source = KernelSource.of(
                "moe/grouped_gemm.cu",
                INTERMEDIATE=facts.intermediate_size,
                GATED=gated,
                TILE_ROWS=tile.rows,
                STAGES=tile.stages,
                **sizes,
                **act,
            )
            shared_bytes = tile.stages * (tile.rows + _WEIGHT_ROWS) * _ROW_BYTES
            return gpu.kernel(source, "grouped_gemm", signature="pppppppp", shared_bytes=shared_bytes)

        self._products = [(tile, product(tile, 1), product(tile, 0)) for tile in _TILES]
        max_pairs = max_tokens * facts.top_k
        self._said = gpu.workspace("moe-said", max_pairs * facts.hidden_size * facts.act.itemsize)
        self._order = gpu.workspace("moe-order", max_pairs * 4)
        self._tiles = gpu.workspace("moe-tiles", self._max_tiles(max_pairs, _TILES[0]) * _TILE_BYTES)

    @staticmethod
    def serves(facts: MoeExpertsFacts) -> bool:
        """Whether the kernels handle this activation type and these sizes."""
        return (
            facts.act is not DType.float32
            and facts.hidden_size % 8 == 0
            and facts.intermediate_size % 8 == 0
            and facts.num_experts <= _MAX_EXPERTS
        )

    def run(
        self, gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
    ) -> None:
        """Enqueue for at most `max_tokens` rows."""
        facts, num_tokens = self._facts, x.shape[0]
        num_pairs = num_tokens * facts.top_k
        tile, into, back = next(
            choice for choice in self._products if num_pairs <= choice[0].mean_pairs * facts.num_experts
        )
        max_tiles = self._max_tiles(num_pairs, tile)
        order, tiles = self._order.data_ptr, self._tiles.data_ptr
        self._sort.launch(
            self._stream,
            (1,),
            _SORT_THREADS,
            ids.data_ptr,
            ids.strides[0],
            order,
            tiles,
            num_pairs,
            tile.rows,
            max_tiles,
        )
        shared = (order, tiles, weights.data_ptr, weights.strides[0])
        into.launch(
            self._stream,
            (-(-facts.intermediate_size // (_WEIGHT_ROWS // 2)), max_tiles),
            _THREADS,
            x.data_ptr,
            x.strides[0],
            gate_up.data_ptr,
            *shared,
            self._activated.data_ptr,
        )
        back.launch(
            self._stream,
            (-(-facts.hidden_size // _WEIGHT_ROWS), max_tiles),
            _THREADS,
            self._activated.data_ptr,
            facts.intermediate_size,
            down.data_ptr,
            *shared,
            self._said.data_ptr,
        )
        self._sum.launch(
            self._stream,
            (num_tokens, -(-facts.hidden_size // (8 * _SUM_THREADS))),
            _SUM_THREADS,
            self._said.data_ptr,
            out.data_ptr,
            out.strides[0],
        )

    def _max_tiles(self, num_pairs: int, tile: _Tile) -> int:
        """Tiles of whole rows, and one that is not full for every expert that has pairs."""
        return num_pairs // tile.rows + min(self._facts.num_experts, num_pairs)
