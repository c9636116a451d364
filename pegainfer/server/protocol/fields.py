"""Typed access to the fields of a JSON object. A field that is null counts as absent; one of the wrong type
is a `RequestError` that names it. Fields that nobody asks for are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pegainfer.errors import RequestError

__all__ = ["Fields"]

T = TypeVar("T")

_MAX_INTEGER = 2**63 - 1
_EXACT_FLOAT = 2**53


class Fields:
    """The fields of `body`; raises `RequestError` if that is no object."""

    __slots__ = ("_values",)

    def __init__(self, body: object) -> None:
        if not isinstance(body, dict):
            raise RequestError("the request body must be a JSON object")
        self._values: dict[str, Any] = body

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """A field as it came; None when absent."""
        return self._values.get(name)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise _wrong(name, "a string", value)

    def integer(self, name: str) -> int | None:
        """A 64-bit integer; `5.0` is one, too."""
        value = self._values.get(name)
        return None if value is None else _integer(name, value)

    def number(self, name: str) -> float | None:
        """A number."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        raise _wrong(name, "a number", value)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise _wrong(name, "a boolean", value)

    def mapping(self, name: str) -> dict[str, Any] | None:
        """An object."""
        value = self._values.get(name)
        if value is None or isinstance(value, dict):
            return value
        raise _wrong(name, "an object", value)

    def texts(self, name: str) -> tuple[str, ...]:
        """A string or a list of strings."""
        value = self._values.get(name)
        if isinstance(value, str):
            return (value,)
        return self._list(name, "a string or a list of strings", value, _text) or ()

    def integers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers."""
        return self._list(name, "a list of integers", self._values.get(name), _integer)

    def biases(self, name: str) -> dict[int, float] | None:
        """An object that maps token ids, as strings, to numbers."""
        found: dict[int, float] = {}
        for key, value in (self.mapping(name) or {}).items():
            if not key.isascii() or not key.removeprefix("-").isdigit() or len(key) > 20:
                raise RequestError(f"{name}: keys must be token ids, got {key!r:.40}", param=name)
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise RequestError(f"{name}: values must be numbers, got {value!r:.40}", param=name)
            found[int(key)] = float(value)
        return found or None

    def _list(
        self, name: str, wanted: str, value: object, item: Callable[[str, object], T]
    ) -> tuple[T, ...] | None:
        if value is None:
            return None
        if not isinstance(value, list):
            raise _wrong(name, wanted, value)
        return tuple(item(name, entry) for entry in value)


def _text(name: str, value: object) -> str:
    if isinstance(value, str):
        return value
    raise _wrong(name, "a string or a list of strings", value)


def _integer(name: str, value: object) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT_FLOAT:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_INTEGER:
        return value
    raise _wrong(name, "an integer", value)


def _wrong(name: str, wanted: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {wanted}, got {value!r:.80}", param=name)
