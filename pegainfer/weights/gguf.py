"""The GGUF container: metadata and tensor directory of a mapped file, every length checked against its end.

Knows the file format, versions 2 and 3, little endian; what the tensors mean to a model is `gguf_model`'s.
String arrays (a vocabulary) are walked once and decoded only when they are asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.weights.gguf_types import GgufType, gguf_type, supported_types
from pegainfer.weights.quantized import quantize
from pegainfer.weights.safetensors import map_file

__all__ = ["GgufFile", "GgufMetadata", "GgufTensor"]

_MAX_DIMS = 4
_MAX_INTEGER = 1 << 40
_RECODED_BYTES = 1 << 20
_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("u1"), 1: np.dtype("i1"), 2: np.dtype("<u2"), 3: np.dtype("<i2"), 4: np.dtype("<u4"),
    5: np.dtype("<i4"), 6: np.dtype("<f4"), _BOOL: np.dtype("?"), 10: np.dtype("<u8"), 11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A checked directory entry. `shape` has the outermost dimension first; `start` is a byte of the file."""

    name: str
    type: GgufType
    shape: tuple[int, ...]
    start: int
    nbytes: int

    @property
    def format(self) -> WeightFormat:
        """What `GgufFile.rows` gives."""
        return self.type.format

    @property
    def num_rows(self) -> int:
        """Product of all dimensions but the last."""
        return math.prod(self.shape[:-1])


@dataclass(frozen=True, slots=True)
class _Strings:
    """A string array that was walked but not decoded: `count` strings between two bytes of the file."""

    start: int
    stop: int
    count: int


class GgufMetadata(Mapping[str, Any]):
    """The metadata: numbers, booleans, strings, lists of strings and NumPy arrays."""

    def __init__(self, data: np.ndarray[Any, np.dtype[np.uint8]], values: dict[str, Any]) -> None:
        self._data = data
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if isinstance(value, _Strings):
            value = self._values[key] = self._decode(value)
        return value

    def __iter__(self) -> Any:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _decode(self, strings: _Strings) -> list[str]:
        body = self._data[strings.start : strings.stop].tobytes()
        length_at = struct.Struct("<Q").unpack_from
        texts, position = [], 0
        for _ in range(strings.count):
            start = position + 8
            position = start + length_at(body, position)[0]
            texts.append(body[start:position].decode("utf-8", "replace"))
        return texts


class GgufFile:
    """A mapped GGUF file. The constructor checks header, metadata and directory; raises `WeightsError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        self._view = self._data.data
        self._position = 0
        if self._take(4) != b"GGUF":
            raise self._error("this is not a GGUF file")
        version = self._number("<I")
        if version not in (2, 3):
            raise self._error(f"GGUF version {version} is not supported, only 2 and 3 (little endian)")
        num_tensors, num_values = self._number("<Q"), self._number("<Q")
        self.metadata = GgufMetadata(self._data, self._read_metadata(num_values))
        self.tensors = self._read_directory(num_tensors)

    def rows(
        self, tensor: GgufTensor, start: int = 0, stop: int | None = None
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Rows of a tensor in its `format`, uint8 `[rows, row_bytes]`: a view of the file, or new memory if
        the stored type has to be re-encoded.
        """
        data = self._data[tensor.start : tensor.start + tensor.nbytes].reshape(tensor.num_rows, -1)[
            start:stop
        ]
        decode = tensor.type.decode
        if decode is None:
            return data
        row_bytes = tensor.format.row_bytes(tensor.shape[-1])
        out = np.empty((len(data), row_bytes), np.uint8)
        step = max(1, _RECODED_BYTES // data.shape[1])
        for low in range(0, len(data), step):
            blocks = np.ascontiguousarray(data[low : low + step]).reshape(-1, tensor.type.block_bytes)
            with np.errstate(all="ignore"):  # a damaged scale may be infinite
                values = decode(blocks).reshape(-1, tensor.shape[-1])
                out[low : low + step] = quantize(values, tensor.format).data
        return out

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata, not negative; required without a default. Raises `WeightsError`."""
        value = self._metadata_value(key, default)
        if type(value) is not int or not 0 <= value <= _MAX_INTEGER:
            raise self._error(f"metadata {key} must be a whole number, got {value!r:.60}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number of the metadata; required without a default. Raises `WeightsError`."""
        value = self._metadata_value(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self._error(f"metadata {key} must be a positive number, got {value!r:.60}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata; required without a default. Raises `WeightsError`."""
        value = self._metadata_value(key, default)
        if not isinstance(value, str):
            raise self._error(f"metadata {key} must be a string, got {value!r:.60}")
        return value

    def _metadata_value(self, key: str, default: Any) -> Any:
        value = self.metadata.get(key, default)
        if value is None:
            raise self._error(f"metadata {key} is missing")
        return value

    def _read_metadata(self, count: int) -> dict[str, Any]:
        self._expect(count, 13, "metadata entries")
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self._string("a metadata key")
            if key in values:
                raise self._error(f"the metadata names {key!r} twice")
            values[key] = self._value(key, self._number("<I"))
        return values

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0].item()

    def _array(self, key: str) -> Any:
        kind, count = self._number("<I"), self._number("<Q")
        if kind != _STRING:
            return self._numbers(key, kind, count)
        self._expect(count, 8, f"strings in {key!r}")
        start = position = self._position
        length_at, view = struct.Struct("<Q").unpack_from, self._view
        try:
            for _ in range(count):
                position += 8 + length_at(view, position)[0]
        except (struct.error, OverflowError):
            position = self._data.size + 1
        if position > self._data.size:
            raise self._error(f"the strings of {key!r} run past the end; the file is truncated")
        self._position = position
        return _Strings(start, position, count)

    def _numbers(self, key: str, kind: int, count: int) -> np.ndarray[Any, Any]:
        if kind not in _SCALARS:
            raise self._error(f"the metadata {key!r:.80} has the unknown type {kind}")
        dtype = _SCALARS[kind]
        self._expect(count, dtype.itemsize, f"values in {key!r:.80}")
        raw = self._take(count * dtype.itemsize)
        # A byte other than 0 and 1 is no valid NumPy boolean.
        return np.frombuffer(raw, np.uint8) != 0 if kind == _BOOL else np.frombuffer(raw, dtype)

    def _read_directory(self, count: int) -> dict[str, GgufTensor]:
        self._expect(count, 24, "tensors")
        entries: dict[str, tuple[tuple[int, ...], GgufType, int]] = {}
        for _ in range(count):
            name = self._string("a tensor name")
            if name in entries:
                raise self._error(f"the directory names {name!r} twice")
            num_dims = self._number("<I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self._error(f"tensor {name!r} has {num_dims} dimensions")
            shape = tuple(self._number("<Q") for _ in range(num_dims))[::-1]
            entries[name] = shape, self._type(name, self._number("<I")), self._number("<Q")
        alignment = self.integer("general.alignment", 32)
        if alignment < 8 or alignment & (alignment - 1):
            raise self._error(f"the alignment {alignment} is not a power of two of at least 8")
        start = -(-self._position // alignment) * alignment
        tensors = {
            name: self._check_tensor(name, shape, kind, start + offset, alignment)
            for name, (shape, kind, offset) in entries.items()
        }
        previous, end = "", start
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.nbytes)):
            if tensor.start < end:
                raise self._error(f"tensors {previous!r} and {tensor.name!r} overlap")
            previous, end = tensor.name, tensor.start + tensor.nbytes
        return tensors

    def _check_tensor(
        self, name: str, shape: tuple[int, ...], kind: GgufType, start: int, alignment: int
    ) -> GgufTensor:
        if 0 in shape:
            raise self._error(f"tensor {name!r} has the empty shape {list(shape)}")
        if shape[-1] % kind.block_size:
            raise self._error(
                f"tensor {name!r} has rows of {shape[-1]} values, "
                f"not whole {kind.name} blocks of {kind.block_size}"
            )
        nbytes = math.prod(shape) // kind.block_size * kind.block_bytes
        if start % alignment:
            raise self._error(f"tensor {name!r} is not aligned to {alignment} bytes")
        if start + nbytes > self._data.size:
            raise self._error(
                f"tensor {name!r} ends at byte {start + nbytes} but the file has {self._data.size}; "
                "it is truncated, download it again"
            )
        return GgufTensor(name, kind, shape, start, nbytes)

    def _type(self, name: str, number: int) -> GgufType:
        kind = gguf_type(number)
        if isinstance(kind, str):
            raise self._error(
                f"tensor {name!r} has type {kind}; supported are {', '.join(supported_types())} "
                "(take a file quantised to one of those, for example Q8_0)"
            )
        return kind

    def _expect(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold, before anything loops over it."""
        left = self._data.size - self._position
        if count * least > left:
            raise self._error(
                f"the header claims {count} {what} but only {left} bytes follow; the file is damaged"
            )

    def _take(self, count: int) -> bytes:
        start, stop = self._position, self._position + count
        if stop > self._data.size:
            raise self._error(f"the header runs past the end of {self._data.size} bytes; it is truncated")
        self._position = stop
        return self._view[start:stop].tobytes()

    def _number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        return int(value)

    def _string(self, what: str) -> str:
        try:
            return self._take(self._number("<Q")).decode("utf-8")
        except UnicodeDecodeError:
            raise self._error(f"{what} is not valid UTF-8") from None

    def _error(self, problem: str) -> WeightsError:
        return WeightsError(f"{self.path}: {problem}")
