"""A row's product is the same bits whatever other rows, and however many threads, share the call."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.kernels import load_providers
from pegainfer.kernels.linear.cpu import NATIVE_FORMATS
from pegainfer.ops.linear import LinearFacts, linear, random_weight
from pegainfer.ops.op import bind
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from tests.ops.native import LEVELS, device_of

load_providers(DeviceKind.cpu)


@pytest.mark.parametrize("format", sorted(NATIVE_FORMATS))
@pytest.mark.parametrize("level", LEVELS)
def test_rows_do_not_see_each_other(level: str, format: WeightFormat) -> None:
    rng = np.random.default_rng(3)
    columns, outputs = 320, 212
    x = rng.normal(0, 1, (512, columns)).astype(np.float32)
    raw = random_weight(rng, format, outputs, columns)
    results = {}
    for threads in (1, 2):
        device = device_of(level, threads)
        launch = bind(linear, LinearFacts(columns, outputs, format, DType.float32), device)
        weight = launch.pack(raw)  # type: ignore[attr-defined]  # launchers of this op pack
        for count in (1, 2, 3, 7, 13, 64, 512):
            out = device.zeros((count, outputs), DType.float32)
            launch(x=device.from_numpy(x[:count]), weight=weight, out=out)
            results[threads, count] = device.to_numpy(out)
    for (_, count), result in results.items():
        assert np.array_equal(result, results[1, 512][:count])
