"""Parameters: which checkpoint tensors a model takes, and how each becomes device memory.

Layers declare names, shapes and formats in a `ParameterTable` while they are built; whoever loads offers the
tensors in any order, and a parameter is packed the moment its last part has arrived. Formats come from the
checkpoint's headers, so that every op is bound, and the memory is known, before any weight is read.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.mapped import mapping_of
from pegainfer.runtime.tensor import Tensor
from pegainfer.weights.quantized import quantize

__all__ = [
    "BuildContext",
    "CheckpointEntry",
    "Parameter",
    "ParameterTable",
    "common_format",
    "convert",
    "release_pages",
    "when_complete",
]


class Parameter:
    """A device tensor that is there once its weights have been loaded."""

    __slots__ = ("_tensor",)

    def __init__(self) -> None:
        self._tensor: Tensor | None = None

    def set(self, tensor: Tensor) -> None:
        """Called once, by loading."""
        self._tensor = tensor

    @property
    def is_loaded(self) -> bool:
        """Whether the memory is there."""
        return self._tensor is not None

    @property
    def tensor(self) -> Tensor:
        """The device memory; only there after loading."""
        assert self._tensor is not None, "a parameter was used before it was loaded"
        return self._tensor


def when_complete(
    num_parts: int, finish: Callable[[list[RawWeight]], None]
) -> list[Callable[[RawWeight], None]]:
    """One acceptor per part; the last one to be called passes all parts, in order, to `finish`."""
    parts: dict[int, RawWeight] = {}

    def acceptor(part: int) -> Callable[[RawWeight], None]:
        def accept(raw: RawWeight) -> None:
            parts[part] = raw
            if len(parts) == num_parts:
                finish([parts[index] for index in range(num_parts)])
                for taken in parts.values():
                    release_pages(taken)
                parts.clear()

        return accept

    return [acceptor(part) for part in range(num_parts)]


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint tensor that a parameter takes, in the format in which it wants to be given it."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    accept: Callable[[RawWeight], None]


@dataclass(slots=True)
class ParameterTable:
    """Every checkpoint tensor that a model takes. `format_of(name)` says how the checkpoint stores a matrix.

    `nbytes` is the device memory of all declared parameters.
    """

    device: Device
    format_of: Callable[[str], WeightFormat]
    entries: dict[str, CheckpointEntry] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def num_parameters(self) -> int:
        """Numbers in all declared tensors."""
        return sum(math.prod(entry.shape) for entry in self.entries.values())

    def declare(
        self, name: str, shape: tuple[int, ...], *, format: WeightFormat, accept: Callable[[RawWeight], None]
    ) -> None:
        """Say that the tensor `name` of `shape` is taken."""
        if name in self.entries:
            raise ValueError(f"tensor {name} is declared twice")
        self.entries[name] = CheckpointEntry(name, shape, format, accept)

    def vector(self, names: Sequence[str], sizes: Sequence[int]) -> Parameter:
        """A float32 vector made of one or several vectors, one after the other."""

        parameter = Parameter()

        def finish(parts: list[RawWeight]) -> None:
            values = [np.ascontiguousarray(raw.data).reshape(-1).view(np.float32) for raw in parts]
            parameter.set(self.device.from_numpy(np.concatenate(values)))

        for name, size, accept in zip(names, sizes, when_complete(len(names), finish), strict=True):
            self.declare(name, (size,), format=WeightFormat.f32, accept=accept)
        self.nbytes += sum(sizes) * DType.float32.itemsize
        return parameter

    def matrix(
        self,
        names: Sequence[str],
        rows: Sequence[int],
        columns: int,
        *,
        format: WeightFormat,
        pack: Callable[..., Tensor],
        nbytes: int,
    ) -> Parameter:
        """A matrix `[sum(rows), columns]` that `pack` makes of one or several, one below the other."""

        parameter = Parameter()

        def finish(parts: list[RawWeight]) -> None:
            parameter.set(pack(*parts))

        for name, count, accept in zip(names, rows, when_complete(len(names), finish), strict=True):
            self.declare(name, (count, columns), format=format, accept=accept)
        self.nbytes += nbytes
        return parameter


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What layers are built with: where they run, how they compute and cache, where they declare weights."""

    table: ParameterTable
    act: DType
    kv_dtype: DType
    block_size: int

    @property
    def device(self) -> Device:
        """The device that ops are bound to."""
        return self.table.device


def common_format(formats: Sequence[WeightFormat]) -> WeightFormat:
    """The format in which several matrices can share one packed weight: their own, the lossless `q4_1` for
    4-bit mixtures, else a plain one.
    """
    distinct = set(formats)
    if len(distinct) == 1:
        return formats[0]
    if distinct == {WeightFormat.q4_0, WeightFormat.q4_1}:
        return WeightFormat.q4_1
    return WeightFormat.f32 if WeightFormat.f32 in distinct else WeightFormat.bf16


def convert(raw: RawWeight, format: WeightFormat, *, name: str = "tensor") -> RawWeight:
    """The same values in another format; raises `WeightsError` when they do not fit it."""
    if raw.format is format:
        return raw
    if raw.format is WeightFormat.q4_0 and format is WeightFormat.q4_1:
        return _with_minimum(raw)
    if format.is_quantized:
        raise WeightsError(f"{name}: {raw.format} cannot be turned into {format}")
    values = raw.dequantize()
    release_pages(raw)
    if format is WeightFormat.f16 and values.size and np.abs(values).max() > np.finfo(np.float16).max:
        raise WeightsError(f"{name}: values do not fit float16; use --dtype bfloat16")
    return quantize(values, format)


def release_pages(raw: RawWeight) -> None:
    """Take the pages of a mapped weight out of this process's memory; they are read again if touched."""
    mapped = mapping_of(raw.data)
    if mapped is None or not raw.data.flags.c_contiguous:
        return
    start = raw.data.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (start + raw.data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0:
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


def _with_minimum(raw: RawWeight) -> RawWeight:
    """`d * (q - 8)` as `d * q + m` with `m = -8 d`, which float16 holds exactly."""
    old, new = WeightFormat.q4_0.block_bytes, WeightFormat.q4_1.block_bytes
    blocks = np.ascontiguousarray(raw.data).reshape(-1, old)
    scales = blocks[:, :2].copy().view(np.float16)
    out = np.empty((blocks.shape[0], new), np.uint8)
    out[:, :2] = blocks[:, :2]
    out[:, 2:4] = (scales * np.float16(-8.0)).view(np.uint8)
    out[:, 4:] = blocks[:, 2:]
    return RawWeight(WeightFormat.q4_1, raw.shape, out.reshape(raw.data.shape[0], -1))
