"""The golden gate: logits of every family through the real worker, against fixtures and an oracle."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.sampling_params import SamplingParams
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import SafetensorsFile
from pegainfer.worker.worker import Worker
from tests.model_files import gguf_metadata, gguf_name, write_gguf
from tests.models.decoder_oracle import decoder_logits, log_softmax
from tests.models.tiny_models import QWEN3_SHAPE, YARN_CONFIG, random_weights
from tests.models.worker_driver import (
    GOLDEN,
    Driver,
    MemoryCheckpoint,
    full_rows,
    golden_worker,
    make_worker,
    prompt_scores,
)

FIXTURES = ("llama_smol", "llama3_rope", "qwen2", "qwen3_dense", "qwen3_moe")
EVERYTHING = SamplingParams(temperature=0.0, logprobs=-1, prompt_logprobs=-1)
LIMIT = 1e-5


@pytest.fixture(params=["native", "numpy"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setenv("PEGAINFER_DISABLE_NATIVE", "1")
    return str(request.param)


def scored(worker: Worker, ids: np.ndarray[Any, Any], cuts: list[int]) -> np.ndarray[Any, Any]:
    """Log-probabilities `[B, T, V]` of sequences computed side by side, cut into chunks at `cuts`."""
    driver, vocab_size = Driver(worker), worker.info.vocab_size
    names = [f"row {row}" for row in range(len(ids))]
    for name, tokens in zip(names, ids.tolist(), strict=True):
        driver.add(name, tokens, EVERYTHING)
    bounds = [0, *cuts, ids.shape[1]]
    steps = [driver.step(dict.fromkeys(names, stop - start)) for start, stop in pairwise(bounds)]
    rows = []
    for name in names:
        last = steps[-1][name].logprobs
        assert last is not None
        rows.append(full_rows([*prompt_scores(step[name] for step in steps), last], vocab_size))
    return np.stack(rows)


def distance(ours: np.ndarray[Any, Any], golden: np.ndarray[Any, Any]) -> float:
    """Relative L2 of logits, up to the constant that log-probabilities do not have."""
    expected = log_softmax(golden)
    return float(np.linalg.norm(ours - expected) / np.linalg.norm(golden))


@pytest.mark.parametrize("name", FIXTURES)
def test_fixture(name: str, provider: str) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    ids, expected = golden["input_ids"], golden["logits_f32"]
    length = ids.shape[1]
    worker = golden_worker(name, max_logprobs=-1)
    try:
        incremental = list(range(length - 6, length))
        for cuts in ([], [1], [7, 16, 17], incremental):
            ours = scored(worker, ids, cuts)
            reference = golden["logits_f32_incremental"] if cuts is incremental else expected
            assert distance(ours, reference) < LIMIT
            assert (ours.argmax(-1) == reference.argmax(-1)).all()
    finally:
        worker.close()


@pytest.mark.parametrize("name", ["llama_smol", "qwen2", "qwen3_dense", "qwen3_moe"])
def test_oracle_agrees_with_the_fixture(name: str) -> None:
    """So that it may judge models that have no fixture."""
    golden = np.load(GOLDEN / name / "golden.npz")
    config = json.loads((GOLDEN / name / "config.json").read_text())
    weights = fixture_weights(name)
    for ids, expected in zip(golden["input_ids"], golden["logits_f32"], strict=True):
        ours = decoder_logits(config, weights, ids.tolist())
        assert np.linalg.norm(ours - expected) / np.linalg.norm(expected) < 3e-6


def fixture_weights(name: str) -> dict[str, np.ndarray[Any, Any]]:
    file = SafetensorsFile(GOLDEN / name / "model.safetensors")
    return {tensor: file.get(tensor).dequantize() for tensor in file.tensors}


def yarn_checkpoint(**changes: Any) -> MemoryCheckpoint:
    weights = random_weights(YARN_CONFIG, 7, head_scale=4.0)
    return MemoryCheckpoint({**YARN_CONFIG, **changes}, weights, format=WeightFormat.f32)


def yarn_distance(checkpoint: MemoryCheckpoint) -> float:
    ids = np.random.default_rng(8).integers(0, 193, (2, 90))
    expected = np.stack([decoder_logits(YARN_CONFIG, checkpoint.values(), row) for row in ids.tolist()])
    worker = make_worker(checkpoint, dtype="float32", max_logprobs=-1)
    try:
        return distance(scored(worker, ids, [33, 80]), expected)
    finally:
        worker.close()


@pytest.mark.parametrize("name", ["llama_smol", "qwen2", "qwen3_dense"])
def test_fixture_as_gguf(name: str, tmp_path: Path) -> None:
    """The same numbers from a GGUF file, which spells names and (llama) rotated pairs differently."""
    config = json.loads((GOLDEN / name / "config.json").read_text())
    tensors = {}
    for tensor, values in fixture_weights(name).items():
        if name.startswith("llama") and ("q_proj" in tensor or "k_proj" in tensor):
            heads = config["num_attention_heads" if "q_proj" in tensor else "num_key_value_heads"]
            halves = values.reshape(heads, 2, -1, values.shape[1])
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        tensors[gguf_name(tensor)] = quantize(values, WeightFormat.f32)
    write_gguf(tmp_path / "model.gguf", gguf_metadata(config), tensors)
    golden = np.load(GOLDEN / name / "golden.npz")
    worker = golden_worker(str(tmp_path / "model.gguf"), dtype="auto", max_logprobs=-1)
    try:
        assert worker.info.dtype == "float32"
        assert distance(scored(worker, golden["input_ids"], [11]), golden["logits_f32"]) < LIMIT
    finally:
        worker.close()


def test_yarn_untied(provider: str) -> None:
    """90 positions of a model stretched from 64, against float64."""
    assert yarn_distance(yarn_checkpoint()) < LIMIT


YARN = YARN_CONFIG["rope_scaling"]


@pytest.mark.parametrize(
    "rope",
    [
        None,
        {**YARN, "rope_type": "linear"},
        {**YARN, "attention_factor": 1.0},
        {**YARN, "factor": 3.9},
        {**YARN, "beta_fast": 2.0},
        {**YARN, "original_max_position_embeddings": 32},
    ],
)
def test_the_gate_sees_a_wrong_rope(rope: Any) -> None:
    assert yarn_distance(yarn_checkpoint(rope_scaling=rope)) > 100 * LIMIT


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3_dense", {"rope_parameters": {"rope_theta": 10000.0}}),
        ("llama3_rope", {"rope_parameters": {"rope_type": "default", "factor": 1.0}}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("qwen3_moe", {"num_experts_per_tok": 2}),
        ("llama_smol", {"rms_norm_eps": 1e-3}),
        (
            "qwen2",
            {"num_key_value_heads": 2, "num_attention_heads": 6, "rope_parameters": {"rope_theta": 1e5}},
        ),
    ],
)
def test_the_gate_sees_a_wrong_setting(name: str, overrides: dict[str, Any]) -> None:
    golden = np.load(GOLDEN / name / "golden.npz")
    worker = golden_worker(name, max_logprobs=-1, hf_overrides=overrides)
    try:
        assert distance(scored(worker, golden["input_ids"], []), golden["logits_f32"]) > 100 * LIMIT
    finally:
        worker.close()


def without(weights: dict[str, Any], *parts: str) -> dict[str, Any]:
    return {name: value for name, value in weights.items() if not any(part in name for part in parts)}


def interleaved(weights: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Query and key rows in an order in which half-split rotation turns neighbours."""
    size = config["head_dim"]
    order = np.arange(size).reshape(2, -1).T.reshape(-1)
    changed = dict(weights)
    for name, value in weights.items():
        if "q_proj.weight" in name or "k_proj.weight" in name:
            changed[name] = value.reshape(-1, size, value.shape[1])[:, order].reshape(value.shape)
        if "q_norm" in name or "k_norm" in name:
            changed[name] = value[order]
    return changed


@pytest.mark.parametrize("mistake", ["no q/k norm", "no bias", "interleaved rotation"])
def test_the_gate_sees_a_wrong_decoder(mistake: str) -> None:
    """The weights of a fixture in a decoder that leaves something out, or turns the wrong pairs."""
    name = "qwen2" if mistake == "no bias" else "qwen3_dense"
    config = json.loads((GOLDEN / name / "config.json").read_text())
    weights = fixture_weights(name)
    if mistake == "interleaved rotation":
        weights = interleaved(weights, config)
    else:
        config["architectures"] = ["LlamaForCausalLM"]
        weights = without(weights, ".bias", "q_norm", "k_norm")
    golden = np.load(GOLDEN / name / "golden.npz")
    worker = make_worker(MemoryCheckpoint(config, weights), dtype="float32", max_logprobs=-1)
    try:
        assert distance(scored(worker, golden["input_ids"], []), golden["logits_f32"]) > 0.1
    finally:
        worker.close()


def test_bfloat16_stays_close_to_float32() -> None:
    """A real shape (fewer layers), teacher-forced: what bfloat16 weights, activations and cache cost."""
    weights = random_weights(QWEN3_SHAPE, 11, head_scale=3.0)
    checkpoint = MemoryCheckpoint(QWEN3_SHAPE, weights)
    ids = np.random.default_rng(12).integers(0, QWEN3_SHAPE["vocab_size"], 96).tolist()
    expected = log_softmax(decoder_logits(QWEN3_SHAPE, checkpoint.values(), ids, dtype=np.float32))
    worker = make_worker(checkpoint, kv_cache_memory_bytes=64 << 20, max_logprobs=20)
    try:
        assert worker.info.dtype == "bfloat16"
        driver = Driver(worker)
        driver.add("all", ids, SamplingParams(temperature=0.0, prompt_logprobs=20))
        outputs = driver.run("all", chunk=40)
    finally:
        worker.close()
    regrets, errors = [], []
    for score, row in zip(prompt_scores(outputs), expected, strict=False):
        regrets.append(row.max() - row[score.top_ids[0]])
        ours = dict(zip(score.top_ids, score.top_logprobs, strict=True))
        errors += [abs(ours[token] - row[token]) for token in np.argsort(-row)[:8] if token in ours]
    assert len(errors) > 0.98 * 8 * (len(ids) - 1)
    assert max(regrets) <= 0.20
    assert np.mean(errors) <= 0.06
    assert np.quantile(errors, 0.99) <= 0.20
    assert np.mean(errors) > 1e-5  # otherwise nothing was rounded and nothing was tested
