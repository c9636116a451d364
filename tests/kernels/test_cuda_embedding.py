"""Embedding tables on a GPU, whatever they are stored as. Needs no GPU: what is copied to it is looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.errors import WeightsError
from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.linear import random_weight
from pegainfer.ops.op import bind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor
from pegainfer.worker.build import bind_ops
from tests.models.tiny_models import CONFIG, random_weights
from tests.models.worker_driver import MemoryCheckpoint, engine_config

ROWS, WIDTH = 211, 96


class CopyingGpu(PlannedGpu):
    """Keeps what is copied to it."""

    def __init__(self) -> None:
        super().__init__("sm_90a")
        self.copies: list[np.ndarray[Any, Any]] = []

    def upload(self, array: np.ndarray[Any, np.dtype[np.uint8]], target: Tensor) -> None:
        assert array.nbytes == target.nbytes
        self.copies.append(array)


@pytest.fixture(autouse=True)
def providers() -> None:
    from pegainfer.kernels import load_providers
    from pegainfer.runtime.device import DeviceKind

    load_providers(DeviceKind.cuda)


@pytest.mark.parametrize("act", [DType.bfloat16, DType.float16, DType.float32])
@pytest.mark.parametrize("format", WeightFormat)
def test_a_table_of_its_own_holds_the_stored_values_in_the_activation_type(
    act: DType, format: WeightFormat
) -> None:
    raw = random_weight(np.random.default_rng(1), format, ROWS, WIDTH)
    gpu = CopyingGpu()
    launch: Any = bind(embedding, EmbeddingFacts(ROWS, WIDTH, format, act, tied=False), gpu)
    packed = launch.pack(raw)
    assert packed.nbytes == launch.packed_bytes() == ROWS * WIDTH * act.itemsize
    (copied,) = gpu.copies
    table = copied.view(act.numpy).reshape(ROWS, WIDTH)
    assert np.array_equal(table, raw.dequantize().astype(act.numpy))


def test_another_table_is_refused() -> None:
    launch: Any = bind(
        embedding, EmbeddingFacts(ROWS, WIDTH, WeightFormat.q8_0, DType.bfloat16, tied=False), CopyingGpu()
    )
    for format, rows in ((WeightFormat.q4_0, ROWS), (WeightFormat.q8_0, ROWS + 1)):
        with pytest.raises(WeightsError, match=r"expected a q8_0 weight of shape \[211, 96\]"):
            launch.pack(random_weight(np.random.default_rng(1), format, rows, WIDTH))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
@pytest.mark.parametrize("format", WeightFormat)
def test_untied_models_of_every_format_bind(format: WeightFormat, dtype: str) -> None:
    config = {**CONFIG, "tie_word_embeddings": False}
    checkpoint: Any = MemoryCheckpoint(config, random_weights(config, 3), format=format)
    gpu = PlannedGpu("sm_90a")
    bind_ops(engine_config(dtype=dtype), checkpoint, device=gpu)
    assert "gather/gather_rows.cu" in {source.path for source in gpu.sources}
