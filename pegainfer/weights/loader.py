"""Where a model is, and opening it: from a name on the command line to a `Checkpoint` and a `Tokenizer`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.errors import ConfigError, TokenizerError, WeightsError
from pegainfer.tokenizer.files import tokenizer_from_directory
from pegainfer.tokenizer.gguf_vocabulary import tokenizer_from_gguf
from pegainfer.tokenizer.tokenizer import Tokenizer
from pegainfer.weights import builtin, hub
from pegainfer.weights.checkpoint import Checkpoint
from pegainfer.weights.dummy import DummyCheckpoint
from pegainfer.weights.gguf import GgufFile
from pegainfer.weights.gguf_model import GgufCheckpoint, config_from_gguf, generation_config_from_gguf
from pegainfer.weights.safetensors import SafetensorsCheckpoint

__all__ = ["load_tokenizer", "open_checkpoint", "resolve_model"]

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(/[\w./-]+\.gguf)?")


def resolve_model(model: ModelOptions, load: LoadOptions) -> Path:
    """The local directory or file of `model.model`, downloaded first if need be: an existing path, a built-in
    name, or a hub id (`org/name`, or `org/name/file.gguf`). Raises `ConfigError` or `WeightsError`.
    """
    return _locate(model.model, model.revision, load, _wanted(load))


def open_checkpoint(model: ModelOptions, load: LoadOptions) -> Checkpoint:
    """The model's weights and configuration, headers checked, no weight read yet."""
    path = resolve_model(model, load)
    file = _weights_file(path, load.load_format)
    if load.load_format == "dummy":
        config, generation_config = _configs(path, file)
        config = _override(config, model.hf_overrides)
        return DummyCheckpoint(
            path, config, _generation_config(model, generation_config), seed=model.seed, dtype=model.dtype
        )
    if file is not None:
        checkpoint = GgufCheckpoint(file)
        checkpoint.config = _override(checkpoint.config, model.hf_overrides)
        checkpoint.generation_config = _generation_config(model, checkpoint.generation_config)
        return checkpoint
    config, generation_config = _configs(path, None)
    config = _override(config, model.hf_overrides)
    return SafetensorsCheckpoint(path, config, _generation_config(model, generation_config))


def load_tokenizer(model: ModelOptions, load: LoadOptions) -> Tokenizer:
    """The tokenizer of `model.tokenizer`, or of the model itself. Raises `TokenizerError`."""
    name = model.tokenizer or model.model
    revision = model.revision if name == model.model else None
    wanted = hub.Wanted.tokenizer if model.tokenizer else _wanted(load)
    path = _locate(name, revision, load, wanted)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return tokenizer_from_directory(path)
    file = path if path.is_file() else _only_gguf(path)
    if file is None:
        return tokenizer_from_directory(path)
    if file.suffix != ".gguf":
        raise TokenizerError(f"{file} holds no tokenizer; pass --tokenizer or --skip-tokenizer-init")
    return tokenizer_from_gguf(GgufFile(file).metadata, where=file)


def _wanted(load: LoadOptions) -> hub.Wanted:
    """Dummy weights need a configuration only."""
    return hub.Wanted.tokenizer if load.load_format == "dummy" else hub.Wanted.everything


def _locate(name: str, revision: str | None, load: LoadOptions, wanted: hub.Wanted) -> Path:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if name in builtin.MODELS:
        return builtin.pull(name)
    if _HUB_ID.fullmatch(name) and not name.startswith("."):
        return hub.fetch(name, revision=revision, load=load, wanted=wanted)
    raise ConfigError(
        f"model {name!r:.200} is no existing directory or .gguf file, no hub id (org/name) "
        f"and no built-in model ({', '.join(builtin.MODELS)})"
    )


def _weights_file(path: Path, load_format: str) -> Path | None:
    """The GGUF file to open, or None for a directory of safetensors (or a bare configuration for dummies)."""
    if path.is_file():
        if path.suffix == ".gguf" and load_format != "safetensors":
            return path
        if path.suffix == ".json" and load_format == "dummy":
            return None
        raise WeightsError(f"{path} is no directory or .gguf file that --load-format {load_format} can open")
    if (path / "config.json").is_file() and load_format != "gguf":
        if load_format == "dummy" or any(path.glob("*.safetensors")):
            return None
        if not any(path.glob("*.gguf")):
            raise WeightsError(f"{path} has a config.json but no .safetensors file")
    file = _only_gguf(path)
    if file is None:
        wanted = "no .gguf file" if load_format == "gguf" else "neither a config.json nor a .gguf file"
        raise WeightsError(f"{path} has {wanted}")
    if load_format == "safetensors":
        raise WeightsError(f"{path} has no .safetensors file")
    return file


def _only_gguf(directory: Path) -> Path | None:
    files = sorted(directory.glob("*.gguf"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files[:8])
        raise WeightsError(f"{directory} has several GGUF files ({names}); name the one to serve")
    return files[0] if files else None


def _configs(path: Path, gguf: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and generation configuration of a directory, a JSON file or a GGUF file."""
    if gguf is not None:
        file = GgufFile(gguf)
        return config_from_gguf(file), generation_config_from_gguf(file)
    if path.is_file():
        return _read_json(path), {}
    generation = path / "generation_config.json"
    return _read_json(path / "config.json"), _read_json(generation) if generation.is_file() else {}


def _generation_config(model: ModelOptions, own: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults from where the options say. Token ids are facts of the model and stay in any case."""
    chosen = own
    if model.generation_config == "vllm":
        chosen = {}
    elif model.generation_config != "auto":
        chosen = _read_json(Path(model.generation_config).expanduser() / "generation_config.json")
    ids = {key: value for key, value in own.items() if key.endswith("_token_id")}
    return {**ids, **chosen, **model.override_generation_config}


def _override(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the values of `overrides`; nested objects are merged."""
    merged = dict(config)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _override(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not valid JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return value
