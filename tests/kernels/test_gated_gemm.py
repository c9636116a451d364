"""The gated product of many rows: which sizes it takes from the library, and how it is launched."""

from __future__ import annotations

from typing import Any

import pytest

from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.kernels.linear.gated import GatedGemm, share_of_work
from pegainfer.runtime.dtypes import DType

BF16 = DType.bfloat16


def test_the_share_of_work_counts_edges_and_idle_rounds() -> None:
    assert share_of_work(256, 128, clusters=1) == 1
    assert share_of_work(128, 128, clusters=1) == 0.5
    assert share_of_work(256, 128, clusters=4) == 0.25
    assert share_of_work(257, 128, clusters=2) == pytest.approx(257 / 512)
    assert share_of_work(256, 5 * 128, clusters=4) == pytest.approx(5 / 8)


def test_it_takes_what_fills_the_gpu() -> None:
    gpu: Any = PlannedGpu("sm_90a")
    gate_up = GatedGemm(gpu, BF16, n=9728, k=2560)
    sizes = (1, 130, 384, 512, 640, 1024, 1040, 2048, 8192)
    assert [rows for rows in sizes if gate_up.suits(rows)] == [512, 1024, 1040, 2048, 8192]


class CountingGpu(PlannedGpu):
    """A GPU that notes the blocks of each launch."""

    def kernel(self, *arguments: Any, **options: Any) -> Any:
        made: Any = super().kernel(*arguments, **options)
        launch = made.launch

        def noting(stream: Any, grid: tuple[int, ...], *rest: Any) -> None:
            self.grids.append(grid)
            launch(stream, grid, *rest)

        made.launch = noting
        return made

    grids: list[tuple[int, ...]]


@pytest.mark.parametrize(("rows", "blocks"), [(1, 20 * 2), (256, 20 * 2), (257, 40 * 2), (8192, 132)])
def test_there_are_never_more_clusters_than_tiles(rows: int, blocks: int) -> None:
    gpu: Any = CountingGpu("sm_90a")
    gpu.grids = []
    product = GatedGemm(gpu, BF16, n=2560, k=64)
    x, out = gpu.empty((rows, 64), BF16), gpu.empty((rows, 2560), BF16)
    product(x, gpu.empty((2 * 2560 * 64 * 2,), DType.uint8), out)
    assert gpu.grids == [(blocks,)]


def test_other_gpus_types_and_sizes_are_left_to_the_library() -> None:
    hopper: Any = PlannedGpu("sm_90a")
    assert GatedGemm.serves(hopper, BF16, 2560, 128, BF16)
    assert not GatedGemm.serves(hopper, BF16, 2560, 128, DType.float32)
    assert not GatedGemm.serves(hopper, DType.float32, 2560, 128, DType.float32)
    assert not GatedGemm.serves(hopper, BF16, 2564, 128, BF16)
    ada: Any = PlannedGpu("sm_89")
    assert not GatedGemm.serves(ada, BF16, 2560, 128, BF16)
