"""`pegainfer kernels --explain MODEL`: which provider serves each op of a model on this machine, and from
which artifact its code comes. Binds the model; reads no weights.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pegainfer.cli.arguments import ArgumentParser, engine_config, make
from pegainfer.config import option
from pegainfer.errors import ConfigError
from pegainfer.log import setup_logging

if TYPE_CHECKING:
    from pegainfer.config import EngineConfig
    from pegainfer.ops.op import Binding
    from pegainfer.runtime.device import Device

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class ExplainOptions:
    """Which model to explain."""

    explain: str | None = option(None, "The model, as another way to write the first word.", metavar="MODEL")


def run(arguments: list[str]) -> int:
    """Print the table."""
    parser = ArgumentParser(
        "kernels",
        "Show which kernel runs each operation of a model on this machine. No weights are read.",
        examples=(
            "pegainfer kernels --explain smollm2",
            "PEGAINFER_CPU_ISA=avx2 pegainfer kernels ./Qwen3-0.6B",
        ),
    )
    parser.add_model()
    parser.add_options(ExplainOptions, "Kernels")
    parser.add_engine_options()
    namespace = parser.parse(arguments)
    explain = make(ExplainOptions, namespace).explain
    if explain is not None:
        if getattr(namespace, "model", explain) != explain:
            raise ConfigError(f"the model is given twice: {namespace.model} and --explain {explain}")
        namespace.model = explain
    setup_logging()
    config = engine_config(namespace)

    from pegainfer.engine.build import make_device

    device = make_device(config)
    try:
        bindings = _bindings(config, device)
        print(f"{config.model.model} on {device.name} ({device.arch})")
        for line in _table(bindings, device):
            print(line)
    finally:
        device.close()
    return 0


def _bindings(config: EngineConfig, device: Device) -> list[Binding]:
    """What is bound for the model and for sampling."""
    from pegainfer.ops.op import record_bindings
    from pegainfer.weights.loader import open_checkpoint
    from pegainfer.worker.build import bind_ops
    from pegainfer.worker.kernels_ahead import kernels_ahead

    checkpoint = open_checkpoint(config.model, config.load)
    try:
        with kernels_ahead(device, lambda planned: bind_ops(config, checkpoint, device=planned)):
            bind_ops(config, checkpoint, device=device)  # compiles what is missing, side by side
        with record_bindings() as bindings:
            bind_ops(config, checkpoint, device=device)
        return bindings
    finally:
        checkpoint.close()


def _table(bindings: Sequence[Binding], device: Device) -> list[str]:
    counts: Counter[tuple[str, ...]] = Counter()
    for binding in bindings:
        provider = binding.provider
        home = provider.factory.__module__.removeprefix("pegainfer.")
        counts[binding.op, _facts(binding.facts), provider.name, home, _artifact(binding, device)] += 1
    rows: list[tuple[str, ...]] = [("op", "facts", "times", "provider", "defined in", "artifact")]
    rows += [(op, facts, str(n), *rest) for (op, facts, *rest), n in counts.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _facts(facts: Any) -> str:
    """The facts that say something: no flags that are off, no names of fields that are plain."""
    words = []
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if value is True:
            words.append(field.name)
        elif value is not None and value is not False:
            words.append(f"{field.name}={value:g}" if isinstance(value, float) else f"{field.name}={value}")
    return " ".join(words)


def _artifact(binding: Binding, device: Device) -> str:
    """Where the machine code is."""
    from pegainfer.kernels.build import library_name
    from pegainfer.runtime.device import DeviceKind

    if binding.provider.name == "native" and device.kind is DeviceKind.cpu:
        return library_name(device.arch)
    return "NumPy" if device.kind is DeviceKind.cpu else f"cubins of {device.arch}"
