"""safetensors files by memory map, with a check of every header field of our own.

A file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}` and the
data. Nothing in the header is believed before it is compared with the size of the file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.runtime.mapped import MappedFile
from pegainfer.weights.checkpoint import TensorInfo, canonical_names
from pegainfer.weights.fp8 import SCALE_SUFFIX, fp8_weight, scale_shape

__all__ = ["SafetensorsCheckpoint", "SafetensorsFile", "StoredTensor", "map_file"]

_MAX_HEADER = 100_000_000
_ITEMSIZE = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_FP8 = "F8_E4M3"
_FORMATS = {"F32": WeightFormat.f32, "F16": WeightFormat.f16, "BF16": WeightFormat.bf16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A checked header entry; `start` and `stop` are byte offsets in the data section."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One mapped file. The constructor checks the whole header and raises `WeightsError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        data = map_file(path)
        if data.size < 8:
            raise self._error(f"{data.size} bytes are too few for a header; the file is truncated")
        length = int.from_bytes(data[:8].tobytes(), "little")
        if length > _MAX_HEADER:
            raise self._error(f"the header claims {length} bytes; this is not a safetensors file")
        if 8 + length > data.size:
            raise self._error(
                f"the header claims {length} bytes but only {data.size - 8} follow; the file is truncated"
            )
        self._data = data[8 + length :]
        self.tensors = self._check(self._parse(data[8 : 8 + length].tobytes()))

    def info(self, name: str) -> TensorInfo:
        """Format and shape; raises `WeightsError` for an element type that weights cannot have."""
        tensor = self.tensors[name]
        if tensor.dtype not in _FORMATS:
            raise self._error(f"tensor {name!r} has type {tensor.dtype}; supported are {', '.join(_FORMATS)}")
        return TensorInfo(_FORMATS[tensor.dtype], tensor.shape)

    def get(self, name: str) -> RawWeight:
        """The tensor as a view of the mapped file."""
        info = self.info(name)
        return RawWeight(info.format, info.shape, self.rows(name))

    def rows(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes of a tensor of any type, `[rows, row_bytes]`, as a view of the mapped file."""
        tensor = self.tensors[name]
        row_bytes = (tensor.shape[-1] if tensor.shape else 1) * _ITEMSIZE[tensor.dtype]
        return self._data[tensor.start : tensor.stop].reshape(math.prod(tensor.shape[:-1]), row_bytes)

    def _parse(self, header: bytes) -> dict[str, Any]:
        def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            entries = dict(pairs)
            if len(entries) < len(pairs):
                twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
                raise self._error(f"the header names {twice!r} twice")
            return entries

        try:
            entries = json.loads(header, object_pairs_hook=unique)
        except (ValueError, RecursionError) as error:
            raise self._error(f"the header is not valid JSON ({str(error)[:100]})") from None
        if not isinstance(entries, dict):
            raise self._error("the header is not a JSON object")
        entries.pop("__metadata__", None)
        return entries

    def _check(self, entries: dict[str, Any]) -> dict[str, StoredTensor]:
        tensors = {name: self._check_entry(name, entry) for name, entry in entries.items()}
        previous, end = "", 0
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
            if tensor.start < end:
                raise self._error(f"tensors {previous!r} and {name!r} overlap")
            previous, end = name, tensor.stop
        return tensors

    def _check_entry(self, name: str, entry: Any) -> StoredTensor:
        if not isinstance(entry, dict):
            raise self._error(f"the header entry of {name!r} is not an object")
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if not isinstance(dtype, str) or dtype not in _ITEMSIZE:
            raise self._error(f"tensor {name!r} has the unknown type {dtype!r:.40}")
        if not _is_sizes(shape):
            raise self._error(f"tensor {name!r} has the invalid shape {shape!r:.80}")
        if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._error(f"tensor {name!r} has the invalid offsets {offsets!r:.80}")
        start, stop = offsets
        if stop > self._data.size:
            raise self._error(
                f"tensor {name!r} ends at byte {stop} of the data but there are only {self._data.size}; "
                "the file is truncated"
            )
        nbytes = math.prod(shape) * _ITEMSIZE[dtype]
        if nbytes != stop - start:
            raise self._error(
                f"tensor {name!r} of type {dtype} and shape {shape!r:.80} needs {nbytes} bytes "
                f"but its offsets span {stop - start}"
            )
        return StoredTensor(dtype, tuple(shape), start, stop)

    def _error(self, problem: str) -> WeightsError:
        return WeightsError(f"{self.path}: {problem}")


class SafetensorsCheckpoint:
    """A Hugging Face directory: one or several safetensors files under one set of names.

    An FP8 matrix and the tensor of its factors are one tensor here, of the matrix's name.
    """

    def __init__(self, path: Path, config: dict[str, Any], generation_config: dict[str, Any]) -> None:
        self.path = path
        self.config = config
        self.generation_config = generation_config
        owners = _open_files(path)
        stored = canonical_names(owners, config, where=path)
        found = [(name, owners[old], old) for name, old in stored.items()]
        # In the order of the bytes, so that loading reads the files from front to back.
        found.sort(key=lambda item: (item[1].path.name, item[1].tensors[item[2]].start))
        self._tensors = {name: (file, old) for name, file, old in found}

    def names(self) -> list[str]:
        return [name for name in self._tensors if not self._belongs_to_another(name)]

    def info(self, name: str) -> TensorInfo:
        file, stored = self._find(name)
        if not self._is_fp8(name):
            return file.info(stored)
        shape = file.tensors[stored].shape
        self._check_scales(name, shape)
        return TensorInfo(WeightFormat.fp8, shape)

    def get(self, name: str) -> RawWeight:
        file, stored = self._find(name)
        info = self.info(name)
        if info.format is not WeightFormat.fp8:
            return file.get(stored)
        scales_file, scales = self._find(name + SCALE_SUFFIX)
        return fp8_weight(info.shape, file.rows(stored), scales_file.get(scales), name=name)

    def close(self) -> None:
        self._tensors = {}

    def _is_fp8(self, name: str) -> bool:
        found = self._tensors.get(name)
        return found is not None and found[0].tensors[found[1]].dtype == _FP8

    def _belongs_to_another(self, name: str) -> bool:
        return name.endswith(SCALE_SUFFIX) and self._is_fp8(name.removesuffix(SCALE_SUFFIX))

    def _check_scales(self, name: str, shape: tuple[int, ...]) -> None:
        if len(shape) != 2:
            raise WeightsError(
                f"{self.path}: the FP8 tensor {name!r} has the shape {list(shape)}, no matrix's"
            )
        if name + SCALE_SUFFIX not in self._tensors:
            raise WeightsError(f"{self.path}: the FP8 tensor {name!r} has no {name + SCALE_SUFFIX!r}")
        file, stored = self._tensors[name + SCALE_SUFFIX]
        found = file.info(stored).shape
        if found != scale_shape(shape):
            raise WeightsError(
                f"{self.path}: tensor {name + SCALE_SUFFIX!r} has the shape {list(found)}, an FP8 matrix of "
                f"shape {list(shape)} needs {list(scale_shape(shape))}"
            )

    def _find(self, name: str) -> tuple[SafetensorsFile, str]:
        if name not in self._tensors:
            raise WeightsError(f"{self.path}: tensor {name!r} is missing")
        return self._tensors[name]


def map_file(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of a file, read-only, without reading them yet. Raises `WeightsError`."""
    try:
        mapped = MappedFile.open(path)
    except ValueError:
        raise WeightsError(f"{path}: the file is empty") from None
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read ({error.strerror})") from None
    return np.frombuffer(mapped, np.uint8)


def _is_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)


def _open_files(path: Path) -> dict[str, SafetensorsFile]:
    """Stored tensor name -> the file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _open_shards(index)
    files = sorted(path.glob("*.safetensors"))
    if (path / "model.safetensors").is_file():
        files = [path / "model.safetensors"]
    owners: dict[str, SafetensorsFile] = {}
    for file in map(SafetensorsFile, files):
        for name in file.tensors:
            if name in owners:
                both = f"{owners[name].path.name} and {file.path.name}"
                raise WeightsError(f"{path}: tensor {name!r} is in {both}")
            owners[name] = file
    return owners


def _open_shards(index: Path) -> dict[str, SafetensorsFile]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        raise WeightsError(f"{index}: not a JSON object with a `weight_map`") from None
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise WeightsError(f"{index}: `weight_map` must map tensor names to file names")
    files: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or shard in ("", ".", ".."):
            raise WeightsError(f"{index}: shard {shard!r:.120} is not the name of a file beside it")
        if not (index.parent / shard).is_file():
            raise WeightsError(f"{index.parent}: shard {shard} is missing; download it again")
        files[shard] = SafetensorsFile(index.parent / shard)
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            raise WeightsError(f"{index.parent / shard}: tensor {name!r} of the index is not there")
    return {name: files[shard] for name, shard in weight_map.items()}
