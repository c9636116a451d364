"""Command-line flags made from the metadata of option dataclasses, in the spellings of vLLM.

A flag is the field's name with dashes; underscores are taken too. Booleans have a `--no-` form, sizes take
suffixes, lists several words, JSON values a JSON text. `--config FILE` (TOML or JSON, the flags' names as
keys) gives values that the command line overrides. `--help=WORD` shows the flags that mention a word.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import shutil
import tomllib
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from pegainfer.cli.foreign import drop_foreign
from pegainfer.config import EngineConfig, ServerOptions, parse_size
from pegainfer.errors import ConfigError

__all__ = ["ArgumentParser", "as_words", "engine_config", "engine_values", "make", "server_options"]

T = TypeVar("T")

_TITLES = {"LoadOptions": "Loading", "CacheOptions": "KV cache", "EngineConfig": "Device"}


class ArgumentParser(argparse.ArgumentParser):
    """The parser of one verb. Every wrong argument raises `ConfigError`; values that were not given are
    absent from the namespace.
    """

    def __init__(self, verb: str, description: str, *, examples: Sequence[str] = ()) -> None:
        epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples) if examples else None
        super().__init__(
            prog=f"pegainfer {verb}",
            description=description,
            epilog=epilog,
            formatter_class=_HelpFormatter,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )
        self._verb = verb
        self._takes_engine_flags = False
        self._has_model = False
        self._flags_of: dict[str, list[argparse.Action]] = {}

    def add_model(self) -> None:
        """The model, as the first word or as `--model`."""
        self.add_word("model_word", "MODEL", "a directory, a GGUF file, a hub id, or the built-in `smollm2`")
        self._has_model = True

    def add_word(self, dest: str, metavar: str, help: str) -> None:
        """A word without a flag, which may be left out."""
        self.add_argument(dest, nargs="?", metavar=metavar, help=help)

    def add_engine_options(self) -> None:
        """Everything an engine can be told. Flags of vLLM that mean nothing here are known too."""
        self._takes_engine_flags = True
        for part in _engine_parts():
            self.add_options(part, _TITLES.get(part.__name__, part.__name__.removesuffix("Options")))

    def add_options(self, options: type, title: str, *, only: Sequence[str] = ()) -> None:
        """One group of flags, from the fields of `options` (or those named by `only`) that carry metadata."""
        group = self.add_argument_group(title)
        hints = get_type_hints(options)
        for field in dataclasses.fields(options):
            if "help" in field.metadata and (not only or field.name in only):
                action = _add_flag(group, field, hints[field.name])
                self._flags_of.setdefault(title, []).append(action)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The namespace of a command line; raises `ConfigError`, or leaves with 0 after `--help`."""
        helping = self.add_argument_group("Help")
        helping.add_argument("--config", metavar="FILE", help="TOML or JSON file with values for these flags")
        helping.add_argument(
            "-h", "--help", nargs="?", metavar="WORD", help="this text, or the flags about WORD"
        )
        words = [_spelled(word) for word in arguments]
        for word in words:
            if word in ("-h", "--help"):
                print(self.format_help(), end="")
                raise SystemExit(0)
            if word.startswith("--help="):
                print(self._help_about(word.removeprefix("--help=")))
                raise SystemExit(0)
        namespace = self._parse_words(words)
        if hasattr(namespace, "config"):
            merged = self._parse_file(Path(namespace.config))
            vars(merged).update(vars(namespace))
            namespace = merged
        if self._has_model:
            _merge_model(namespace)
        return namespace

    def error(self, message: str) -> NoReturn:
        """What argparse found wrong, as a `ConfigError`."""
        raise ConfigError(f"{message.removeprefix('argument ')} (see pegainfer {self._verb} --help)")

    def _parse_words(self, words: list[str]) -> argparse.Namespace:
        if self._takes_engine_flags:
            words = drop_foreign(words)
        namespace, unknown = self.parse_known_intermixed_args(words)
        if unknown:
            self._refuse(unknown[0])
        return namespace

    def _refuse(self, word: str) -> NoReturn:
        if not word.startswith("-"):
            self.error(f"unexpected argument {word!r}")
        name = word.partition("=")[0]
        known = [flag for action in self._actions for flag in action.option_strings]
        close = difflib.get_close_matches(name, known, n=1)
        self.error(f"unknown flag {name}" + (f"; did you mean {close[0]}?" if close else ""))

    def _parse_file(self, path: Path) -> argparse.Namespace:
        words: list[str] = []
        for key, value in _read_config(path).items():
            words += _as_words(f"--{key.replace('_', '-')}", value)
        try:
            return self._parse_words(words)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def _help_about(self, word: str) -> str:
        needle = word.lower().replace("_", "-").lstrip("-")
        formatter = self._get_formatter()
        found = False
        for title, actions in self._flags_of.items():
            wanted = [a for a in actions if title.lower() == needle or _mentions(a, needle)]
            if wanted:
                found = True
                formatter.start_section(title)
                formatter.add_arguments(wanted)
                formatter.end_section()
        if not found:
            raise ConfigError(f"no flag of pegainfer {self._verb} mentions {word!r}")
        return formatter.format_help().rstrip()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size((100, 24)).columns, 110)
        super().__init__(prog, max_help_position=34, width=width)

    def add_usage(
        self,
        usage: str | None,
        actions: Iterable[argparse.Action],
        groups: Iterable[Any],
        prefix: str | None = None,
    ) -> None:
        positionals = [f"[{a.metavar}]" for a in actions if not a.option_strings]
        super().add_usage(" ".join(["%(prog)s", *positionals, "[flags]"]), [], [], prefix)


def make(options: Callable[..., T], namespace: argparse.Namespace) -> T:
    """The options object of type `options`, from what the command line gave; the rest keeps its defaults."""
    kind: Any = options
    names = {field.name for field in dataclasses.fields(kind)}
    return options(**{name: value for name, value in vars(namespace).items() if name in names})


def engine_values(namespace: argparse.Namespace) -> dict[str, Any]:
    """What the command line says of the engine, as `LLM(...)` takes it."""
    names = {f.name for part in _engine_parts() for f in dataclasses.fields(part) if "help" in f.metadata}
    return {name: value for name, value in vars(namespace).items() if name in names}


def engine_config(namespace: argparse.Namespace) -> EngineConfig:
    """The engine's configuration; raises `ConfigError` for values that cannot be right."""
    return EngineConfig.from_flat(**engine_values(namespace))


def as_words(namespace: argparse.Namespace, *, exclude: type) -> list[str]:
    """The command line that gives the same namespace again, without the flags of `exclude` and `--config`."""
    kind: Any = exclude
    left_out = {field.name for field in dataclasses.fields(kind)} | {"config", "model_word"}
    words: list[str] = []
    for name, value in vars(namespace).items():
        if name not in left_out and value is not None:
            words += _as_words(f"--{name.replace('_', '-')}", value)
    return words


def server_options(namespace: argparse.Namespace) -> ServerOptions:
    """The HTTP server's options."""
    return make(ServerOptions, namespace)


def _engine_parts() -> list[Any]:
    """The option classes that an `EngineConfig` is made of, itself last."""
    parts = (getattr(EngineConfig(), field.name) for field in dataclasses.fields(EngineConfig))
    return [*(type(part) for part in parts if dataclasses.is_dataclass(part)), EngineConfig]


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any) -> argparse.Action:
    meta = field.metadata
    flag = meta["flag"] or "--" + field.name.replace("_", "-")
    text = meta["help"].replace("%", "%%") + _default_note(field)
    kind = _plain(hint)
    if kind is bool:
        action: argparse.Action = group.add_argument(
            flag, dest=field.name, action=argparse.BooleanOptionalAction, help=text
        )
        return action
    extra: dict[str, Any] = {"metavar": meta["metavar"] or None}
    if meta["kind"] == "list" or get_origin(kind) is tuple:
        extra |= {"nargs": "+", "action": _ListAction, "metavar": meta["metavar"] or _metavar(field.name)}
    elif meta["kind"] == "json":
        extra |= {"type": _json_object, "metavar": "JSON"}
    elif meta["kind"] == "size":
        extra |= {"type": _size, "metavar": "N"}
    elif meta["kind"] == "size_or_auto":
        extra |= {"type": _size_or_auto, "metavar": "N|auto"}
    elif meta["choices"]:
        extra |= {"choices": meta["choices"], "metavar": None}
    else:
        extra |= {
            "type": kind,
            "metavar": meta["metavar"] or ("N" if kind in (int, float) else _metavar(field.name)),
        }
    action = group.add_argument(flag, dest=field.name, help=text, **extra)
    return action


class _ListAction(argparse.Action):
    """Several words, or one JSON list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = [str(item) for item in json.loads(values[0])]
            except (json.JSONDecodeError, TypeError):
                raise argparse.ArgumentError(self, f"{values[0]!r} is not a JSON list") from None
        setattr(namespace, self.dest, tuple(values))


def _plain(hint: Any) -> Any:
    """`int` of `int | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _metavar(name: str) -> str:
    return name.rsplit("_", 1)[-1].upper()


def _default_note(field: dataclasses.Field[Any]) -> str:
    default = field.default
    if default is dataclasses.MISSING or default is None or default in ((), ""):
        return ""
    if isinstance(default, bool):
        return " (default: on)" if default else ""
    if isinstance(default, tuple):
        default = " ".join(default)
    return f" (default: {default})".replace("%", "%%")


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _size_or_auto(text: str) -> int:
    return -1 if text.strip().lower() in ("auto", "-1") else _size(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object, e.g. '{{\"key\": 1}}'")
    return value


def _spelled(word: str) -> str:
    """Dashes for underscores in the name of a flag."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def _mentions(action: argparse.Action, needle: str) -> bool:
    text = " ".join(action.option_strings) + " " + (action.help or "").lower()
    return needle in text


def _read_config(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    try:
        if path.suffix == ".json":
            value = json.loads(text)
        elif path.suffix == ".toml":
            value = tomllib.loads(text)
        else:
            raise ConfigError(f"--config {path}: write it as TOML or JSON, in a file named .toml or .json")
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"--config {path}: expected an object with the names of flags as keys")
    return value


def _as_words(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, dict):
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list | tuple):
        return [f"{flag}={json.dumps(value)}"]
    return [f"{flag}={value}"]


def _merge_model(namespace: argparse.Namespace) -> None:
    word = getattr(namespace, "model_word", None)
    if word is None:
        return
    if getattr(namespace, "model", word) != word:
        raise ConfigError(f"the model is given twice: {word} and --model {namespace.model}")
    namespace.model = word
