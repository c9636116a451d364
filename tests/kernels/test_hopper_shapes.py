"""Shapes of the Hopper product: whatever the sizes, a shape that compiles, fits and covers the weight."""

from __future__ import annotations

import itertools

import pytest

from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.kernels.linear.hopper import HopperGemm, HopperShape, choose_shape
from pegainfer.runtime.cuda.module import compile_cubin
from pegainfer.runtime.dtypes import DType

SHARED = 227 << 10
CLUSTERS = {1: 132, 2: 66, 4: 30}


def shape_of(tokens: int, n: int, k: int, *, gated: bool, clusters: dict[int, int]) -> HopperShape | None:
    return choose_shape(tokens, n, k, gated=gated, max_shared_bytes=SHARED, clusters_by_size=clusters)


def test_shapes_fit_and_cover() -> None:
    sizes = (2, 8, 48, 90, 576, 1024, 2560, 4096, 6144, 9728, 12288, 14336, 25600)
    found = 0
    for tokens, n, k, gated in itertools.product((64, 128), sizes, sizes, (False, True)):
        shape = shape_of(tokens, n, k, gated=gated, clusters=CLUSTERS)
        if shape is None:
            continue
        found += 1
        assert shape.rows % 2 == 0
        assert shape.width % 16 == 0
        assert shape.rows * (2 if gated else 1) <= shape.width <= 256
        assert shape.stages >= 3
        assert shape.shared_bytes <= SHARED
        assert -(-n // shape.outputs) <= CLUSTERS[shape.split]
        if shape.split > 1:  # partial sums take the place of the ring
            pitch = shape.parts * shape.width + 8
            assert tokens * pitch * 4 <= shape.stages * shape.stage_bytes
    assert found > 500


def test_a_weight_that_is_too_large_has_no_shape() -> None:
    assert shape_of(64, 151936, 2560, gated=False, clusters=CLUSTERS) is None


def test_a_gpu_with_room_for_fewer_clusters_gets_another_shape() -> None:
    usual = shape_of(64, 2560, 9728, gated=False, clusters=CLUSTERS)
    fewer = shape_of(64, 2560, 9728, gated=False, clusters={**CLUSTERS, 4: 20})
    none = shape_of(64, 2560, 9728, gated=False, clusters={1: 132, 2: 66, 4: 0})
    assert usual is not None
    assert fewer is not None
    assert none is not None
    assert usual.split == 4
    assert -(-2560 // fewer.outputs) <= {1: 132, 2: 66, 4: 20}[fewer.split]
    assert none.split < 4


class CrampedGpu(PlannedGpu):
    """A GPU whose multiprocessors lie together in smaller groups than usual."""

    def kernel(self, *arguments: object, **options: object) -> object:  # type: ignore[override]
        made = super().kernel(*arguments, **options)  # type: ignore[arg-type]
        made.max_clusters = lambda block: 17  # type: ignore[method-assign]
        return made


def test_the_shape_follows_what_the_driver_says_about_clusters() -> None:
    gemm = HopperGemm(CrampedGpu("sm_90a"), DType.bfloat16, n=2560, k=9728)  # type: ignore[arg-type]
    ((shape, _),) = gemm._kernels
    assert shape.split == 1 or -(-2560 // shape.outputs) <= 17


@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_kind_compiles(split: int) -> None:
    for tokens, rows, gated in ((64, 10, False), (64, 38, True), (128, 74, True), (128, 256, False)):
        shape = HopperShape(tokens, rows, split, gated, stages=4)
        assert compile_cubin(shape.source(DType.float16 if rows == 10 else DType.bfloat16), "sm_90a")
