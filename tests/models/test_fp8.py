"""FP8 checkpoints through the real worker, against an oracle that is given what their weights mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import WeightsError
from pegainfer.kernels import load_providers
from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.layers.linear import Linear, Piece
from pegainfer.layers.parameters import BuildContext, ParameterTable
from pegainfer.ops.linear import LinearFacts, linear, random_weight
from pegainfer.ops.op import bind
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from tests.fp8_files import fp8_copy, write_fp8
from tests.models.decoder_oracle import decoder_logits
from tests.models.test_golden import LIMIT, distance, scored
from tests.models.tiny_models import CONFIG, MOE_CONFIG, random_weights
from tests.models.worker_driver import GOLDEN, golden_worker

Array = np.ndarray[Any, Any]

SMALL = {"vocab_size": 250}  # so that a GPU can return the log-probabilities of all tokens

CUT = {**CONFIG, **SMALL, "hidden_size": 320, "intermediate_size": 200, "head_dim": 40}
"""Several blocks each way, the last ones cut."""

WHOLE = {
    **CONFIG,
    **SMALL,
    "hidden_size": 256,
    "intermediate_size": 384,
    "head_dim": 64,
    "num_attention_heads": 4,
}
"""What a GPU keeps as FP8."""

EXPERTS = {**MOE_CONFIG, **SMALL, "hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 150}


def uneven(config: dict[str, Any]) -> dict[str, Array]:
    """Weights whose blocks of 128 x 128 need very different scales."""
    weights = random_weights(config, 5, head_scale=4.0)
    rng = np.random.default_rng(6)
    for name, values in weights.items():
        if name.endswith("_proj.weight"):
            blocks = np.exp(rng.normal(0, 1, [-(-size // 128) for size in values.shape]))
            by_value = np.repeat(np.repeat(blocks, 128, 0), 128, 1)[: values.shape[0], : values.shape[1]]
            values *= (by_value / np.sqrt((by_value**2).mean())).astype(np.float32)
    return weights


def prompts(config: dict[str, Any]) -> Array:
    return np.random.default_rng(9).integers(0, config["vocab_size"], (2, 24))


def oracle(config: dict[str, Any], weights: dict[str, Array]) -> Array:
    return np.stack([decoder_logits(config, weights, row) for row in prompts(config).tolist()])


@pytest.fixture(params=["native", "numpy"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setenv("PEGAINFER_DISABLE_NATIVE", "1")
    return str(request.param)


def check(directory: Path, config: dict[str, Any], weights: dict[str, Array], **options: Any) -> None:
    """The model of a directory computes what the oracle does with `weights`."""
    expected = oracle(config, weights)
    worker = golden_worker(str(directory), max_logprobs=-1, **options)
    try:
        for cuts in ([], [1], [17]):
            ours = scored(worker, prompts(config), cuts)
            assert distance(ours, expected) < LIMIT
            assert (ours.argmax(-1) == expected.argmax(-1)).all()
    finally:
        worker.close()


@pytest.mark.parametrize("config", [CUT, WHOLE, EXPERTS], ids=["cut blocks", "whole blocks", "experts"])
def test_weights_mean_what_they_say(tmp_path: Path, provider: str, config: dict[str, Any]) -> None:
    meant = write_fp8(tmp_path, config, uneven(config))
    check(tmp_path, config, meant)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [CUT, WHOLE, EXPERTS], ids=["cut blocks", "whole blocks", "experts"])
def test_weights_mean_what_they_say_on_the_gpu(tmp_path: Path, config: dict[str, Any]) -> None:
    meant = write_fp8(tmp_path, config, uneven(config))
    check(tmp_path, config, meant, device="cuda")


def test_quantised_fixture(tmp_path: Path, provider: str) -> None:
    """Close to the fixture it was made of, and exactly what it says itself."""
    source = GOLDEN / "qwen3_dense"
    config = json.loads((source / "config.json").read_text())
    meant = fp8_copy(source, tmp_path)
    check(tmp_path, config, meant)
    golden = np.load(source / "golden.npz")
    worker = golden_worker(str(tmp_path), max_logprobs=-1)
    error = distance(scored(worker, golden["input_ids"], []), golden["logits_f32"])
    worker.close()
    assert 10 * LIMIT < error < 0.3


def test_the_gate_sees_a_wrong_scale(tmp_path: Path) -> None:
    meant = write_fp8(tmp_path, CUT, uneven(CUT))
    meant["model.layers.1.mlp.down_proj.weight"][128:256, 128:] *= 1.1
    with pytest.raises(AssertionError):
        check(tmp_path, CUT, meant)


@pytest.mark.parametrize(("option", "kept"), [("auto", "bf16"), ("bfloat16", "bf16"), ("float32", "f32")])
def test_a_cpu_expands(tmp_path: Path, option: str, kept: str) -> None:
    meant = write_fp8(tmp_path, WHOLE, uneven(WHOLE))
    worker = golden_worker(str(tmp_path), dtype=option, max_logprobs=-1)
    assert worker.info.weight_format == kept
    error = distance(scored(worker, prompts(WHOLE), [9]), oracle(WHOLE, meant))
    worker.close()
    assert error < (LIMIT if kept == "f32" else 0.05)


@pytest.mark.gpu
def test_a_gpu_keeps_them(tmp_path: Path) -> None:
    """Few rows, several times as many, and more than are multiplied without expanding."""
    config = {**WHOLE, "max_position_embeddings": 1024}
    meant = write_fp8(tmp_path, config, uneven(config))
    expected = oracle(config, meant)
    worker = golden_worker(str(tmp_path), dtype="auto", max_logprobs=-1, device="cuda")
    assert worker.info.weight_format == "fp8"
    for cuts in ([], [1, 2, 3], [4], [9], [16]):
        assert distance(scored(worker, prompts(config), cuts), expected) < 0.1
    repeated = np.concatenate([prompts(config)] * 3)
    alone = scored(worker, repeated, [])  # 144 rows at once
    assert distance(alone, np.concatenate([expected] * 3)) < 0.1
    worker.close()


def layer(pieces: list[int], *, act: DType = DType.bfloat16) -> Linear:
    """A layer of fp8 pieces on a GPU that need not be there."""
    load_providers(DeviceKind.cuda)
    table = ParameterTable(PlannedGpu("sm_90a"), lambda name: WeightFormat.fp8)
    context = BuildContext(table, act, act, 16)
    return Linear(context, [Piece(f"p{i}", rows) for i, rows in enumerate(pieces)], in_features=256)


def test_pieces_are_one_product_where_their_blocks_are_whole() -> None:
    whole = layer([512, 128, 128]).whole
    assert whole is not None
    assert whole.out_features == 768
    assert layer([512, 100, 128]).whole is None
    assert layer([200, 200]).whole is None
    assert layer([200]).whole is not None


def test_packing_refuses_stacked_pieces_of_cut_blocks() -> None:
    load_providers(DeviceKind.cuda)
    launch: Any = bind(linear, LinearFacts(256, 400, WeightFormat.fp8, DType.bfloat16), PlannedGpu("sm_90a"))
    rng = np.random.default_rng(0)
    packed = launch.pack(random_weight(rng, WeightFormat.fp8, 400, 256))
    assert packed.nbytes == launch.packed_bytes() == 400 * 256 + 4 * 2 * 4
    parts = [random_weight(rng, WeightFormat.fp8, rows, 256) for rows in (256, 144)]
    assert launch.pack(*parts).nbytes == packed.nbytes
    with pytest.raises(WeightsError, match="different scales"):
        launch.pack(*reversed(parts))
    cut = random_weight(rng, WeightFormat.fp8, 400, 256)
    assert cut.scales is not None
    cut.scales[200:] *= 2
    with pytest.raises(WeightsError, match="different scales"):
        launch.pack(cut)
    with pytest.raises(WeightsError, match="shape"):
        launch.pack(random_weight(rng, WeightFormat.fp8, 384, 256))
