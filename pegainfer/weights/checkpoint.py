"""`Checkpoint`: what a loaded model directory, GGUF file or dummy is to the rest of the engine; and the rules
by which tensor names of different releases become one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pegainfer.errors import WeightsError
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import WeightFormat

__all__ = ["Checkpoint", "TensorInfo", "canonical_names"]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a header says of a tensor: format and shape, outermost dimension first."""

    format: WeightFormat
    shape: tuple[int, ...]


class Checkpoint(Protocol):
    """Weights and configuration of one model, read on demand.

    Names are those of Hugging Face text models (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`),
    whatever the file calls them.
    """

    @property
    def path(self) -> Path:
        """The directory or file that was opened."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """`config.json` or its equivalent, overrides applied."""
        ...

    @property
    def generation_config(self) -> dict[str, Any]:
        """`generation_config.json` or its equivalent, overrides applied; empty if there is none."""
        ...

    def names(self) -> list[str]:
        """Tensors that a text model can take (towers of other modalities and draft layers left out)."""
        ...

    def info(self, name: str) -> TensorInfo:
        """Format and shape of a tensor; raises `WeightsError` if it is absent or of an unknown type."""
        ...

    def get(self, name: str) -> RawWeight:
        """The tensor, usually as a view of the mapped file; raises `WeightsError` as `info` does."""
        ...

    def close(self) -> None:
        """Let go of the files. Views handed out stay valid until they are dropped."""
        ...


_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
_SKIPPED = ("model.visual.", "visual.", "vision_tower.", "model.vision_tower.", "mm_projector.", "mtp.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def canonical_names(stored: Iterable[str], config: Mapping[str, Any], *, where: Path) -> dict[str, str]:
    """Canonical name -> stored name of the tensors that a text model can take.

    Left out: vision towers and projectors, `mtp.*`, layers from `num_hidden_layers` on (draft layers) and
    stored rotary frequencies. Raises `WeightsError` if two stored names become one.
    """
    text = config.get("text_config")
    layers = (text if isinstance(text, Mapping) else config).get("num_hidden_layers")
    names: dict[str, str] = {}
    for old in stored:
        new = _canonical(old)
        layer = _LAYER.match(new)
        if new.startswith(_SKIPPED) or new.endswith(".rotary_emb.inv_freq"):
            continue
        if layer and isinstance(layers, int) and int(layer[1]) >= layers:
            continue
        if new in names:
            raise WeightsError(f"{where}: tensors {names[new]!r} and {old!r} are the same parameter {new!r}")
        names[new] = old
    return names


def _canonical(name: str) -> str:
    if name.startswith(_SKIPPED):
        return name
    for old, new in _PREFIXES:
        if name.startswith(old):
            return new + name[len(old) :]
    # Checkpoints of the bare decoder, without its head, leave the prefix out.
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return "model." + name
    return name
