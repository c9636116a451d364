"""From a checkpoint's configuration to a checked, frozen `ModelConfig`.

Reads the Hugging Face names (GGUF metadata arrives translated to them), in the spellings of several releases
of the format. Every value is checked here; nothing downstream has doubts about ranges.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pegainfer.errors import ConfigError
from pegainfer.layers.rotary import RopeParameters, RopeType
from pegainfer.runtime.dtypes import DType
from pegainfer.weights.fp8 import check_quantization

__all__ = ["ConfigReader", "ModelConfig", "MoeConfig", "read_config"]

_MAX_SIZE = 1 << 24
_MAX_POSITIONS = 1 << 30


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Routed experts: their number, size, and the layers that have them (the others are dense)."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of a decoder. `dtype` is None when the checkpoint does not name one."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeParameters
    moe: MoeConfig | None
    dtype: DType | None


class ConfigReader:
    """Typed access to a configuration; every complaint is a `ConfigError` that names the field.

    Several names may be given for one field (spellings of different releases): the first present one counts.
    A field that is `null` counts as absent.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = values
        self._where = where

    def raw(self, *names: str) -> Any:
        """The value of the first name that is present and not null, else None."""
        for name in names:
            value = self._values.get(name)
            if value is not None:
                return value
        return None

    def integer(self, *names: str, low: int = 1, high: int = _MAX_SIZE, default: int | None = None) -> int:
        """A whole number in `[low, high]`; without a default the field is required."""
        value = self._required(names, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(names[0], f"an integer between {low} and {high}", value)
        return value

    def number(self, *names: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in `(low, high]`."""
        value = self._required(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.error(names[0], f"a number above {low:g} and at most {high:g}", value)
        return float(value)

    def optional_number(self, *names: str, low: float, high: float) -> float | None:
        """A number as above, or None when it is absent."""
        return None if self.raw(*names) is None else self.number(*names, low=low, high=high)

    def boolean(self, *names: str, default: bool | None = None) -> bool:
        """True or false."""
        value = self._required(names, default)
        if not isinstance(value, bool):
            raise self.error(names[0], "true or false", value)
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """A string."""
        value = self._required(names, default)
        if not isinstance(value, str):
            raise self.error(names[0], "a string", value)
        return value

    def section(self, *names: str) -> ConfigReader | None:
        """A nested object, or None when it is absent or empty."""
        value = self.raw(*names)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(names[0], "an object", value)
        return ConfigReader(value, f"{self._where}{names[0]}.") if value else None

    def error(self, name: str, wanted: str, value: object) -> ConfigError:
        """The error for a field whose value is not what was wanted."""
        return ConfigError(f"model configuration: {self._where}{name} must be {wanted}, got {value!r:.80}")

    def _required(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.raw(*names)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"model configuration: the field {self._where}{names[0]} is missing")
        return value


def read_config(values: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The checked configuration of the decoder, with the defaults that are common to the families.

    `values` is the whole configuration; text fields may live in `text_config`. Raises `ConfigError`.
    """
    outer = ConfigReader(values)
    config = outer.section("text_config") or outer
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads", high=4096)
    num_kv_heads = config.integer("num_key_value_heads", high=4096, default=num_heads)
    if num_heads % num_kv_heads:
        raise config.error(
            "num_key_value_heads", f"a divisor of num_attention_heads={num_heads}", num_kv_heads
        )
    if config.raw("head_dim") is None and hidden_size % num_heads:
        raise config.error("hidden_size", f"a multiple of num_attention_heads={num_heads}", hidden_size)
    head_dim = config.integer("head_dim", high=4096, default=hidden_size // num_heads)
    num_layers = config.integer("num_hidden_layers", high=4096)
    activation = config.text("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise config.error("hidden_act", "silu", activation)
    tied = outer if outer.raw("tie_word_embeddings") is not None else config
    _refuse_sliding_window(config)
    quantization = config.raw("quantization_config") or outer.raw("quantization_config")
    if quantization:
        if not isinstance(quantization, Mapping):
            raise config.error("quantization_config", "an object", quantization)
        check_quantization(quantization)
    max_positions = config.integer("max_position_embeddings", high=_MAX_POSITIONS)
    rope = _read_rope(config, head_dim, max_positions)
    if rope.type is RopeType.yarn:
        max_positions = max(max_positions, int(rope.factor * rope.original_max_position_embeddings))
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=config.number("rms_norm_eps", low=0.0, high=1.0),
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied.boolean("tie_word_embeddings", default=False),
        attention_bias=config.boolean("attention_bias", default=False),
        mlp_bias=config.boolean("mlp_bias", default=False),
        rope=rope,
        moe=_read_moe(config, num_layers),
        dtype=_read_dtype(config, outer),
    )


def _read_dtype(config: ConfigReader, outer: ConfigReader) -> DType | None:
    reader = config if config.raw("dtype", "torch_dtype") is not None else outer
    if reader.raw("dtype", "torch_dtype") is None:
        return None
    name = reader.text("dtype", "torch_dtype").removeprefix("torch.")
    if name not in ("float32", "bfloat16", "float16"):
        raise reader.error("dtype", "float32, bfloat16 or float16", name)
    return DType(name)


def _refuse_sliding_window(config: ConfigReader) -> None:
    """Attention here sees every earlier position; a model trained otherwise would silently answer wrongly."""
    kinds = config.raw("layer_types")
    if kinds is not None and (
        not isinstance(kinds, list) or any(not isinstance(kind, str) for kind in kinds)
    ):
        raise config.error("layer_types", "a list of strings", kinds)
    other = sorted(set(kinds or ()) - {"full_attention"})
    if other:
        raise ConfigError(
            f"model configuration: layer_types has {', '.join(other)}; only full_attention is supported"
        )
    if config.boolean("use_sliding_window", default=False):
        raise ConfigError(
            "model configuration: sliding-window attention is not supported; "
            "pass --hf-overrides '{\"use_sliding_window\": false}' if the window is longer than your prompts"
        )


def _read_moe(config: ConfigReader, num_layers: int) -> MoeConfig | None:
    if config.raw("num_experts", "num_local_experts") is None:
        return None
    num_experts = config.integer("num_experts", "num_local_experts", low=0, high=1 << 16)
    if num_experts == 0:
        return None
    dense = config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(layer, int) for layer in dense):
        raise config.error("mlp_only_layers", "a list of layer numbers", dense)
    step = config.integer("decoder_sparse_step", default=1)
    layers = frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return MoeConfig(
        num_experts=num_experts,
        num_experts_per_tok=config.integer("num_experts_per_tok", high=num_experts),
        intermediate_size=config.integer("moe_intermediate_size"),
        norm_topk_prob=config.boolean("norm_topk_prob", default=False),
        layers=layers,
    )


def _read_rope(config: ConfigReader, head_dim: int, max_positions: int) -> RopeParameters:
    """The rope parameters, from the nested spelling or the older top-level one."""
    section = config.section("rope_parameters", "rope_scaling") or ConfigReader({}, "rope_parameters.")
    theta_in = section if section.raw("rope_theta") is not None else config
    theta = theta_in.number("rope_theta", low=1.0, high=1e12, default=10000.0)
    share_in = section if section.raw("partial_rotary_factor") is not None else config
    share = share_in.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0)
    rotary_dim = int(head_dim * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise config.error("head_dim", "such that an even number of dimensions is rotated", head_dim)
    name = section.text("rope_type", "type", default="default")
    if name not in RopeType.__members__:
        raise section.error("rope_type", f"one of {', '.join(RopeType)}", name)
    kind = RopeType(name)
    if kind is RopeType.default:
        return RopeParameters(theta, rotary_dim)
    original = section.integer(
        "original_max_position_embeddings",
        high=_MAX_POSITIONS,
        default=None if kind is RopeType.llama3 else max_positions,
    )
    inferred = max_positions / original if kind is RopeType.yarn and max_positions > original else None
    factor = section.number("factor", low=0.0, high=1e6, default=inferred)
    if kind is RopeType.linear:
        return RopeParameters(theta, rotary_dim, kind, factor)
    if kind is RopeType.llama3:
        low = section.number("low_freq_factor", low=0.0, high=1e6)
        high = section.number("high_freq_factor", low=low, high=1e6)
        return RopeParameters(theta, rotary_dim, kind, factor, original, low, high)
    if factor < 1.0:
        raise section.error("factor", "at least 1", factor)
    return RopeParameters(
        theta,
        rotary_dim,
        kind,
        factor,
        original,
        beta_fast=section.number("beta_fast", low=0.0, high=math.inf, default=32.0),
        beta_slow=section.number("beta_slow", low=0.0, high=math.inf, default=1.0),
        truncate=section.boolean("truncate", default=True),
        mscale=section.optional_number("mscale", low=0.0, high=1e3),
        mscale_all_dim=section.optional_number("mscale_all_dim", low=0.0, high=1e3),
        attention_factor=section.optional_number("attention_factor", low=0.0, high=1e3),
    )
