"""A tokenizer from the files of a Hugging Face directory: `tokenizer.json`, `tokenizer_config.json` and chat
templates.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from pegainfer.errors import TokenizerError
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["tokenizer_from_directory"]

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_from_directory(path: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises `TokenizerError` if it is absent or broken."""
    file = path / "tokenizer.json"
    if not file.is_file():
        raise TokenizerError(
            f"{path} has no tokenizer.json; pass --tokenizer, or --skip-tokenizer-init to serve token ids"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises bare Exceptions.
        raise TokenizerError(f"{file}: not a tokenizer ({str(error)[:160]})") from None
    config = _read_json(path / "tokenizer_config.json")
    special_map = _read_json(path / "special_tokens_map.json")
    named = {name: _text(config.get(name)) or _text(special_map.get(name)) for name in _NAMED}
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend,
        named_tokens={name: text for name, text in named.items() if text},
        chat_templates=_chat_templates(path, config),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    )


def _chat_templates(path: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files of their own win over those inside `tokenizer_config.json`."""
    templates: dict[str, str] = {}
    inside = config.get("chat_template", _read_json(path / "chat_template.json").get("chat_template"))
    if isinstance(inside, str):
        templates["default"] = inside
    elif isinstance(inside, list):
        for entry in inside:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                templates[str(entry.get("name", "default"))] = entry["template"]
    files = {"default": path / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in files.items():
        if file.is_file():
            try:
                templates[name] = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TokenizerError(f"{file}: cannot be read ({error})") from None
    return templates


def _read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty if there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{file}: not valid JSON ({str(error)[:100]})") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{file}: not a JSON object")
    return value


def _text(value: Any) -> str | None:
    """A token that is written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
