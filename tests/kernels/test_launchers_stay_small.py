"""A server meets thousands of step sizes: launchers must not keep something for each."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

from pegainfer.kernels import load_providers
from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.ops.linear import LinearFacts, linear
from pegainfer.ops.norm_linear import NormLinearFacts, norm_linear
from pegainfer.ops.op import bind
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat

load_providers(DeviceKind.cuda)

SIZES = range(1, 4000)
COLUMNS, OUTPUTS = 256, 512


def grown_by(launch: Any) -> int:
    """Bytes that are held after `launch(rows)` with each of `SIZES`, beyond those after the first few."""
    for rows in (1, 16, 64, 128, 200, 8192):
        launch(rows)
    gc.collect()
    tracemalloc.start()
    for rows in SIZES:
        launch(rows)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return held


def test_products_keep_nothing_per_size() -> None:
    gpu = PlannedGpu("sm_90a")
    bf16 = DType.bfloat16
    plain: Any = bind(linear, LinearFacts(COLUMNS, OUTPUTS, WeightFormat.bf16, bf16), gpu)
    gated: Any = bind(
        norm_linear, NormLinearFacts(COLUMNS, OUTPUTS, WeightFormat.bf16, bf16, 1e-6, gated=True), gpu
    )
    x, normed = (gpu.empty((8192, COLUMNS), bf16) for _ in range(2))
    out = gpu.empty((8192, OUTPUTS), bf16)
    weight, norm = gpu.empty((2 * OUTPUTS * COLUMNS * 2,), DType.uint8), gpu.empty((COLUMNS,), DType.float32)

    def launch(rows: int) -> None:
        plain(x=x.rows(rows), weight=weight, out=out.rows(rows))
        if gated.serves(rows):
            gated(x=x.rows(rows), norm=norm, weight=weight, normed=normed.rows(rows), out=out.rows(rows))

    assert gated.serves(128)
    assert not gated.serves(129)
    assert gated.serves(8192)
    assert grown_by(launch) < 20_000
