"""Building a worker: what is refused, before anything is read where possible, and what is decided."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import CapacityError, ConfigError, UnsupportedModelError, WeightsError
from pegainfer.kvcache.spec import FullAttention, KvCacheSpec
from pegainfer.runtime.device import DeviceKind, MemoryInfo
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.weights.quantized import quantize
from pegainfer.worker.memory import plan_memory
from tests.model_files import write_safetensors
from tests.models.tiny_models import CONFIG, VOCAB, checkpoint, random_weights
from tests.models.worker_driver import GREEDY, Driver, MemoryCheckpoint, engine_config, make_worker

BLOCK_BYTES = 16 * 3 * 2 * 2 * 32 * 2  # tokens, layers, keys and values, heads, head_dim, bytes


def weights() -> dict[str, Any]:
    return random_weights(CONFIG, 3)


def test_every_missing_tensor_is_counted_and_some_are_named() -> None:
    some = {name: value for name, value in weights().items() if "v_proj" not in name and "norm" not in name}
    with pytest.raises(WeightsError, match=r"lacks 16 of 35 tensors: .*layers\.0.*and 12 more"):
        make_worker(MemoryCheckpoint(CONFIG, some))


def test_a_tensor_that_the_architecture_does_not_know_is_refused() -> None:
    extra = {**weights(), "model.layers.0.self_attn.q_proj.bias": np.zeros(192, np.float32)}
    with pytest.raises(WeightsError, match=r"q_proj\.bias"):
        make_worker(MemoryCheckpoint(CONFIG, extra))


def test_the_unused_head_of_a_tied_checkpoint_is_ignored() -> None:
    tied = weights()
    tied["lm_head.weight"] = tied["model.embed_tokens.weight"] * 2
    worker = make_worker(MemoryCheckpoint(CONFIG, tied))
    assert worker.info.num_parameters == sum(value.size for value in weights().values())
    worker.close()


@pytest.mark.parametrize(
    ("name", "shape"),
    [("model.layers.1.mlp.down_proj.weight", (96, 159)), ("model.norm.weight", (95,))],
)
def test_a_wrong_shape_is_named(name: str, shape: tuple[int, ...]) -> None:
    wrong = {**weights(), name: np.ones(shape, np.float32)}
    with pytest.raises(WeightsError, match=rf"{name}.*{shape[0]}.*needs"):
        make_worker(MemoryCheckpoint(CONFIG, wrong))


def test_an_unknown_architecture_lists_the_known_ones() -> None:
    config = {**CONFIG, "architectures": ["GPT2LMHeadModel"]}
    with pytest.raises(UnsupportedModelError, match=r"GPT2LMHeadModel.*LlamaForCausalLM"):
        make_worker(MemoryCheckpoint(config, weights()))


def test_values_beyond_float16_are_refused() -> None:
    big = weights()
    big["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e6
    with pytest.raises(WeightsError, match=r"up_proj.*bfloat16"):
        make_worker(MemoryCheckpoint(CONFIG, big), dtype="float16")


@pytest.mark.parametrize(
    ("format", "option", "dtype", "kept"),
    [
        ("bf16", "auto", "bfloat16", "bf16"),
        ("f32", "auto", "float32", "f32"),
        ("f16", "auto", "float16", "f16"),
        ("bf16", "float32", "float32", "f32"),
        ("f32", "bfloat16", "bfloat16", "bf16"),
        ("bf16", "float16", "float16", "f16"),
        ("q8_0", "auto", "bfloat16", "q8_0"),
        ("q4_1", "float32", "float32", "q4_1"),
    ],
)
def test_dtype(format: str, option: str, dtype: str, kept: str) -> None:
    worker = make_worker(checkpoint(format=WeightFormat(format)), dtype=option)
    assert (worker.info.dtype, worker.info.weight_format) == (dtype, kept)
    bytes_per_block = BLOCK_BYTES * (2 if dtype == "float32" else 1)
    assert worker.info.kv_cache_bytes == worker.info.num_blocks * bytes_per_block
    worker.close()


@pytest.mark.parametrize(
    ("options", "limits"),
    [
        ({"max_num_mixed_tokens": 100}, (512, 100)),
        ({"max_num_batched_tokens": 64}, (64, 64)),
        ({"max_num_batched_tokens": 900}, (900, 900)),  # asked for is asked for, beside decodes as well
        ({"max_num_batched_tokens": 64, "max_num_mixed_tokens": 4000}, (64, 64)),
    ],
)
def test_limits_of_steps(options: dict[str, int], limits: tuple[int, int]) -> None:
    worker = make_worker(checkpoint(), max_model_len=300, num_gpu_blocks_override=40, **options)
    assert (worker.info.max_num_batched_tokens, worker.info.max_num_mixed_tokens) == limits
    worker.close()


def test_info() -> None:
    worker = make_worker(checkpoint(), max_model_len=300, num_gpu_blocks_override=40)
    info = worker.info
    assert (info.architecture, info.vocab_size, info.decodable_vocab_size) == (
        "Qwen3ForCausalLM",
        VOCAB,
        VOCAB,
    )
    assert (info.max_model_len, info.num_blocks, info.block_size) == (300, 40, 16)
    assert (info.max_num_batched_tokens, info.max_num_mixed_tokens) == (512, 512)
    assert list(info.phases) == ["build model", "load weights", "allocate memory", "warm up"]
    assert all(seconds >= 0 for seconds in info.phases.values())
    assert info.weight_bytes >= 2 * info.num_parameters
    worker.close()


def test_context_is_what_the_cache_can_hold() -> None:
    worker = make_worker(checkpoint(), num_gpu_blocks_override=5)
    assert worker.info.max_model_len == 80
    driver = Driver(worker)
    driver.add("full", [1] * 79, GREEDY)
    assert driver.run("full", num_new=2)[-1].token_id is not None
    worker.close()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_model_len": 513}, ConfigError, "512 positions"),
        ({"max_model_len": 0}, ConfigError, "max-model-len"),
        (
            {"max_model_len": 100, "num_gpu_blocks_override": 6},
            CapacityError,
            r"96 tokens.*kv-cache-memory-bytes",
        ),
        ({"num_gpu_blocks_override": 0}, ConfigError, "num-gpu-blocks-override"),
        ({"kv_cache_memory_bytes": 1000}, ConfigError, "at least one block"),
        ({"max_num_seqs": 10**11}, CapacityError, "max-num-seqs"),
        ({"kv_cache_memory_bytes": 1 << 50}, CapacityError, r"weights .*KV cache 1\.05e\+06 GiB"),
    ],
)
def test_what_cannot_be_held_is_refused_before_reading(
    options: Any, error: type[Exception], words: str
) -> None:
    source = checkpoint()
    with pytest.raises(error, match=words):
        make_worker(source, **options)
    assert source.reads == []


class SmallModel:
    """The sizes that the memory sum asks of a model."""

    weight_bytes = 1 << 30
    bytes_per_position = 128


def planned(available: int, *, kind: DeviceKind = DeviceKind.cpu, **options: Any) -> Any:
    config = engine_config(**{"kv_cache_memory_bytes": None, "max_num_seqs": 256, **options})
    model: Any = SmallModel()
    spec = KvCacheSpec(make_spec(), 16)
    memory = MemoryInfo(total=64 << 30, available=available)
    limit = 32768
    return plan_memory(
        config, model, spec, context_limit=limit, step_bytes=50 << 20, memory=memory, kind=kind
    )


def make_spec() -> tuple[Any, ...]:
    return tuple(FullAttention(8, 128, DType.bfloat16) for _ in range(28))  # 112 KiB a token


def test_default_cache_on_the_cpu() -> None:
    per_block = 16 * 112 << 10
    roomy = planned(60 << 30)
    assert roomy.num_blocks == (4 << 30) // per_block
    assert roomy.max_model_len == 32768
    middle = planned(8 << 30)  # a share of 2 GiB would not hold one long request, all of it does
    assert middle.num_blocks == 2048
    assert middle.max_model_len == 32768
    tight = planned(3 << 30)
    assert 512 < tight.max_model_len < 32768
    assert tight.max_model_len == tight.num_blocks * 16
    few = planned(60 << 30, max_num_seqs=2, max_model_len=1000)
    assert few.num_blocks == 2 * 63
    on_gpu = planned(60 << 30, kind=DeviceKind.cuda)
    assert on_gpu.num_blocks > 50 * (1 << 30) // per_block
    with pytest.raises(CapacityError, match=r"weights 1 GiB.*KV cache .*smaller or\s+quantised model"):
        planned(1 << 30)


LOAD = """
import json, sys
from pegainfer.config import EngineConfig
from pegainfer.runtime.cpu import make_cpu_device
from pegainfer.weights.loader import open_checkpoint
from pegainfer.worker.build import build_worker

def status():
    lines = [line.split(":") for line in open("/proc/self/status")]
    return {name: int(value.split()[0]) for name, value in lines if value.endswith("kB\\n")}

config = EngineConfig.from_flat(model=sys.argv[1], kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=16)
device = make_cpu_device(1)
before = status()
worker = build_worker(config, open_checkpoint(config.model, config.load), device=device)
after = status()
print(json.dumps({
    "peak": after["VmHWM"] - before["VmRSS"],
    "files": after["RssFile"] - before["RssFile"],
    "weights": worker.info.weight_bytes >> 10,
}))
"""


def test_loading_streams(tmp_path: Path) -> None:
    """Peak memory is the packed weights and little more: neither the file nor a second copy stays."""
    config = {
        **CONFIG,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "vocab_size": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {name: quantize(value, WeightFormat.bf16) for name, value in random_weights(config, 1).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    del tensors
    script = [sys.executable, "-c", LOAD, str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=120, check=True)
    sizes = json.loads(done.stdout)
    assert sizes["weights"] > 150 << 10
    assert sizes["peak"] < 1.35 * sizes["weights"]
    assert sizes["files"] < 0.5 * sizes["weights"]
