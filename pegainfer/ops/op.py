"""`Op`: what is computed. `Provider`: a factory that turns static facts into a launcher for one device kind,
or declines.

Ops are bound once, while the model is built; nothing dispatches in the hot loop. A launcher is called with
keyword arguments only; tensors it writes are passed in (`out=`). The NumPy reference has the very same
signature over NumPy arrays, with the facts in front: it is the oracle of the parity tests and the slow
fallback of the CPU device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from pegainfer.errors import KernelError
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__ = [
    "Binding",
    "Case",
    "CaseInput",
    "Launcher",
    "Op",
    "Provider",
    "all_ops",
    "bind",
    "bind_fused",
    "record_bindings",
]

FactsT = TypeVar("FactsT")


class Launcher(Protocol):
    """A bound op: enqueues its work on the device's stream. Tensors and Python scalars, all by keyword: the
    signature admits any, so that each provider can spell out its own.
    """

    def __call__(self, *nothing: Any, **arguments: Any) -> None: ...


class CaseInput(Protocol):
    """An argument of a case whose bytes are laid out by the provider: a packed weight, a KV cache."""

    def for_reference(self, facts: Any) -> np.ndarray[Any, Any]:
        """What the reference takes for it."""
        ...

    def for_device(self, facts: Any, device: Device, *, provider: str, launcher: Any) -> Tensor:
        """What `launcher`, bound by the provider of that name, takes for it."""
        ...


@dataclass(frozen=True, slots=True)
class Case(Generic[FactsT]):
    """One parity case: facts, NumPy inputs (or `CaseInput`) by argument name, and which arguments are outputs
    (or updated in place).
    """

    name: str
    facts: FactsT
    arguments: dict[str, Any]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Provider(Generic[FactsT]):
    """How one device kind runs an op. `factory` returns None when it cannot serve these facts."""

    name: str
    kind: DeviceKind
    factory: Callable[[FactsT, Device], Launcher | None]


@dataclass(slots=True)
class Op(Generic[FactsT]):
    """The meaning of an operation.

    `reference(facts, **arrays)` writes the outputs in place, in float32 or better.
    `cases(rng)` yields inputs that cover sizes, edges and dtypes.
    `tolerance(facts)` is the accepted relative L2 error of a provider's outputs against the reference.
    `providers` are tried in order of registration, last registered first.
    """

    name: str
    reference: Callable[..., None]
    cases: Callable[[np.random.Generator], Iterator[Case[FactsT]]]
    tolerance: Callable[[FactsT], float]
    providers: list[Provider[FactsT]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.name in _OPS:
            raise ValueError(f"op {self.name} is defined twice")
        _OPS[self.name] = self

    def provider(
        self, name: str, kind: DeviceKind
    ) -> Callable[[Callable[[FactsT, Device], Launcher | None]], Callable[[FactsT, Device], Launcher | None]]:
        """Decorator that registers a provider factory."""

        def register(
            factory: Callable[[FactsT, Device], Launcher | None],
        ) -> Callable[[FactsT, Device], Launcher | None]:
            self.providers.append(Provider(name=name, kind=kind, factory=factory))
            return factory

        return register


@dataclass(frozen=True, slots=True)
class Binding:
    """One choice of `bind`."""

    op: str
    facts: Any
    provider: Provider[Any]


_OPS: dict[str, Op[Any]] = {}
_RECORDS: list[list[Binding]] = []


def all_ops() -> dict[str, Op[Any]]:
    """Every op that has been defined, by name."""
    return dict(_OPS)


@contextmanager
def record_bindings() -> Iterator[list[Binding]]:
    """Collect what `bind` chooses until the block ends, to explain how a model runs."""
    record: list[Binding] = []
    _RECORDS.append(record)
    try:
        yield record
    finally:
        _RECORDS.pop()


def bind(op: Op[FactsT], facts: FactsT, device: Device) -> Launcher:
    """The launcher of the best provider for `facts` on `device`; raises `KernelError` when none serves
    them.
    """
    launcher = _find(op, facts, device, without="")
    if launcher is None:
        raise KernelError(f"no provider of op {op.name} on {device.kind} serves {facts}")
    return launcher


def bind_fused(op: Op[FactsT], facts: FactsT, device: Device) -> Launcher | None:
    """Like `bind`, for an op that only saves launches: None where the device has no kernel for it, since its
    parts are then better than the reference.
    """
    return _find(op, facts, device, without="numpy")


def _find(op: Op[FactsT], facts: FactsT, device: Device, *, without: str) -> Launcher | None:
    for provider in reversed(op.providers):
        if provider.kind is device.kind and provider.name != without:
            launcher = provider.factory(facts, device)
            if launcher is not None:
                for record in _RECORDS:
                    record.append(Binding(op.name, facts, provider))
                return launcher
    return None
