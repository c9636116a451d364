"""From a checkpoint to a model's parameters: formats before anything is read, then a stream of tensors.

Knows the rules of matching (missing, unexpected, wrong shape); the files are the checkpoint's business, the
packing the parameters'.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from pegainfer.errors import WeightsError
from pegainfer.layers.parameters import ParameterTable, convert
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.weights.checkpoint import Checkpoint

__all__ = ["check_names", "kept_format", "load_parameters", "main_format", "stored_bytes"]

_PLAIN = {DType.float32: WeightFormat.f32, DType.float16: WeightFormat.f16, DType.bfloat16: WeightFormat.bf16}
_SHOWN = 4


def kept_format(stored: WeightFormat, dtype: DType, *, convert: bool, kind: DeviceKind) -> WeightFormat:
    """How a matrix of a model of `dtype` is kept: quantised ones as stored, plain ones too unless `convert`
    asks for `dtype`. A CPU has no instructions for fp8 numbers: there they are expanded to `dtype`.
    """
    if stored is WeightFormat.fp8 and kind is DeviceKind.cpu:
        return _PLAIN[dtype]
    return _PLAIN[dtype] if convert and not stored.is_quantized else stored


def main_format(table: ParameterTable) -> WeightFormat:
    """The format that most numbers of the model's matrices are kept in."""
    counts: Counter[WeightFormat] = Counter()
    for entry in table.entries.values():
        if len(entry.shape) > 1:
            counts[entry.format] += entry.shape[0] * entry.shape[1]
    return counts.most_common(1)[0][0]


def check_names(table: ParameterTable, names: Sequence[str]) -> None:
    """Raise `WeightsError` unless the checkpoint has every tensor that the model takes and no other."""
    present = set(names)
    missing = [name for name in table.entries if name not in present]
    unexpected = [name for name in names if name not in table.entries and not _is_ignorable(name, table)]
    if missing:
        raise WeightsError(
            f"the checkpoint lacks {len(missing)} of {len(table.entries)} tensors: {_some(missing)}"
        )
    if unexpected:
        raise WeightsError(
            f"the checkpoint has {len(unexpected)} tensors that this architecture does not know: "
            f"{_some(unexpected)}; is config.json the right one?"
        )


def stored_bytes(table: ParameterTable, checkpoint: Checkpoint) -> int:
    """Bytes of the checkpoint that `load_parameters` will read."""
    total = 0
    for name in table.entries:
        info = checkpoint.info(name)
        total += math.prod(info.shape[:-1]) * info.format.row_bytes(info.shape[-1])
    return total


def load_parameters(
    table: ParameterTable, checkpoint: Checkpoint, *, on_tensor: Callable[[int], object]
) -> None:
    """Give every tensor of the checkpoint to its parameter; `on_tensor` is told the bytes read after each.

    Raises `WeightsError` for a tensor of the wrong shape.
    """
    for name in checkpoint.names():
        entry = table.entries.get(name)
        if entry is None:
            continue
        raw = checkpoint.get(name)
        if tuple(raw.shape) != entry.shape:
            raise WeightsError(
                f"tensor {name} has the shape {list(raw.shape)}, the model needs {list(entry.shape)}"
            )
        entry.accept(convert(raw, entry.format, name=name))
        on_tensor(raw.nbytes)


def _is_ignorable(name: str, table: ParameterTable) -> bool:
    """A tied checkpoint may still carry the head that it does not use."""
    return name == "lm_head.weight" and name not in table.entries


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
