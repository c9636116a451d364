"""Reading of model configurations: every spelling, every refusal, and the rope tables that follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import ConfigError, UnsupportedModelError
from pegainfer.layers.rotary import RopeParameters, RopeType, attention_factor, cos_sin_table, inv_freq
from pegainfer.models.config import read_config
from pegainfer.models.registry import architecture_of, known_architectures, resolve
from pegainfer.runtime.dtypes import DType

QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(**changes: Any) -> Any:
    values = {**QWEN3_06B, **changes}
    values = {key: value for key, value in values.items() if value is not ...}
    return read_config(values, "Qwen3ForCausalLM")


def test_sizes_are_read_as_given() -> None:
    config = read()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (16, 8, 128)
    assert config.num_heads * config.head_dim != config.hidden_size
    assert config.tie_word_embeddings
    assert config.dtype is DType.bfloat16
    assert config.rope == RopeParameters(1e6, 128)
    assert config.moe is None


def test_absent_fields_follow_from_others() -> None:
    config = read(head_dim=..., num_key_value_heads=..., tie_word_embeddings=..., torch_dtype=...)
    assert config.head_dim == 64
    assert config.num_kv_heads == 16
    assert not config.tie_word_embeddings
    assert config.dtype is None


def test_both_spellings_of_rope_and_dtype_mean_the_same() -> None:
    old = read(rope_scaling={"type": "yarn", **{k: v for k, v in YARN.items() if k != "rope_type"}})
    new = read(
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_theta": 1000000, **YARN},
        torch_dtype=...,
        dtype="bfloat16",
    )
    assert old == new
    assert old.rope.type is RopeType.yarn
    assert old.max_position_embeddings == 131072


def test_text_config_is_used_and_tying_is_read_outside_first() -> None:
    inner = {**QWEN3_06B, "tie_word_embeddings": False}
    config = read_config({"text_config": inner, "tie_word_embeddings": True}, "Qwen3ForCausalLM")
    assert config.hidden_size == 1024
    assert config.tie_word_embeddings


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_experts(name: str) -> None:
    sizes = {name: 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True}
    moe = read(**sizes, mlp_only_layers=[3], decoder_sparse_step=2, num_hidden_layers=8).moe
    assert moe is not None
    assert moe.num_experts == 8
    assert moe.layers == {1, 5, 7}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", ...),
        ("hidden_size", "1024"),
        ("hidden_size", 0),
        ("hidden_size", True),
        ("hidden_size", 1 << 40),
        ("vocab_size", ...),
        ("vocab_size", -1),
        ("intermediate_size", 3072.5),
        ("num_hidden_layers", ...),
        ("num_hidden_layers", 10**6),
        ("num_attention_heads", ...),
        ("num_key_value_heads", 7),
        ("num_key_value_heads", 32),
        ("head_dim", [128]),
        ("rms_norm_eps", ...),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", -1e-6),
        ("max_position_embeddings", ...),
        ("rope_theta", math.inf),
        ("rope_theta", 0),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("hidden_act", "gelu"),
        ("torch_dtype", "int8"),
        ("layer_types", "full_attention"),
        ("num_experts_per_tok", 9),
        ("moe_intermediate_size", ...),
        ("mlp_only_layers", "none"),
    ],
)
def test_a_bad_field_is_named(field: str, value: Any) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    named = "dtype" if field == "torch_dtype" else field
    with pytest.raises(ConfigError, match=rf"\b{named}\b"):
        read(**{**experts, field: value})


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope"}, "rope_type"),
        ({"rope_type": 3}, "rope_type"),
        ({**YARN, "factor": 0.5}, "factor"),
        ({**YARN, "factor": "4"}, "factor"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**YARN, "attention_factor": -1}, "attention_factor"),
        ({**LLAMA3, "low_freq_factor": None}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({k: v for k, v in LLAMA3.items() if k[0] != "o"}, "original_max_position_embeddings"),
        ({"rope_type": "linear"}, "factor"),
        ("yarn", "rope_parameters"),
    ],
)
def test_a_bad_rope_is_named(scaling: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read(rope_scaling=scaling)


def test_what_would_silently_answer_wrongly_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding-window"):
        read(use_sliding_window=True, sliding_window=4096)
    with pytest.raises(ConfigError, match="sliding_attention"):
        read(layer_types=["full_attention", "sliding_attention"])
    for quantization in ({"quant_method": "awq"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}):
        with pytest.raises(UnsupportedModelError, match=r"awq|\[64, 64\]"):
            read(quantization_config=quantization)
    with pytest.raises(ConfigError, match="quantization_config"):
        read(quantization_config="fp8")


def test_fp8_in_blocks_is_taken() -> None:
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert read(quantization_config=quantization) == read()


def test_registry() -> None:
    assert architecture_of(QWEN3_06B) == "Qwen3ForCausalLM"
    assert architecture_of({"architectures": ["Other", "LlamaForCausalLM"]}) == "LlamaForCausalLM"
    with pytest.raises(UnsupportedModelError, match=r"MambaForCausalLM.*Qwen3MoeForCausalLM"):
        architecture_of({"architectures": ["MambaForCausalLM"]})
    for wrong in ({}, {"architectures": []}, {"architectures": "LlamaForCausalLM"}, {"architectures": [3]}):
        with pytest.raises(ConfigError, match="architectures"):
            architecture_of(wrong)
    for name in known_architectures():
        assert callable(resolve(name))


def frequencies(theta: float, dim: int) -> np.ndarray[Any, Any]:
    return theta ** (-np.arange(0, dim, 2) / dim)


def test_default_table_is_cosines_then_sines() -> None:
    table = cos_sin_table(RopeParameters(1e4, 8), 100)
    angles = np.arange(100)[:, None] * frequencies(1e4, 8)
    np.testing.assert_allclose(table, np.concatenate([np.cos(angles), np.sin(angles)], 1), atol=1e-5)


def test_linear_divides_every_frequency() -> None:
    rope = RopeParameters(1e4, 64, RopeType.linear, 2.0)
    np.testing.assert_allclose(inv_freq(rope), frequencies(1e4, 64) / 2, rtol=1e-6)


def test_llama3_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = read(rope_scaling=LLAMA3, rope_theta=500000.0).rope
    plain = frequencies(5e5, 128)
    expected = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1.0:
            expected.append(frequency / 8)
        elif wavelength < 8192 / 4.0:
            expected.append(frequency)
        else:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            expected.append((1 - smooth) * frequency / 8 + smooth * frequency)
    assert expected[0] == plain[0]
    assert expected[-1] == plain[-1] / 8
    np.testing.assert_allclose(inv_freq(rope), expected, rtol=1e-6)


def test_yarn() -> None:
    rope = read(rope_scaling=YARN).rope
    plain = frequencies(1e6, 128)
    low = math.floor(128 * math.log(32768 / (32 * 2 * math.pi)) / (2 * math.log(1e6)))
    high = math.ceil(128 * math.log(32768 / (1 * 2 * math.pi)) / (2 * math.log(1e6)))
    expected = [
        f / 4 * (r := min(max((i - low) / (high - low), 0), 1)) + f * (1 - r) for i, f in enumerate(plain)
    ]
    np.testing.assert_allclose(inv_freq(rope), expected, rtol=1e-6)
    assert attention_factor(rope) == pytest.approx(1.1386, abs=1e-4)
    assert cos_sin_table(rope, 1)[0, 0] == pytest.approx(1.1386, abs=1e-4)


def test_yarn_attention_factor() -> None:
    assert attention_factor(read(rope_scaling={**YARN, "attention_factor": 0.5}).rope) == 0.5
    both = read(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.707}).rope
    ratio = (0.1 * math.log(4) + 1) / (0.1 * 0.707 * math.log(4) + 1)
    assert attention_factor(both) == pytest.approx(ratio)
