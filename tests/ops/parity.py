"""Holding a provider against an op's NumPy reference, whatever the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op, Provider
from pegainfer.runtime.device import Device

__all__ = ["check_provider", "relative_error"]


def check_provider(
    op: Op[Any], provider: Provider[Any], case: Case[Any], device: Device, *, limit: float | None = None
) -> bool:
    """Assert that the provider's outputs are the reference's, up to `limit` instead of the op's own tolerance
    if it is given; False when the provider declines the case's facts.
    """
    launcher = provider.factory(case.facts, device)
    if launcher is None:
        return False
    expected, given = {}, {}
    for name, value in case.arguments.items():
        if hasattr(value, "for_reference"):
            expected[name] = value.for_reference(case.facts)
            given[name] = value.for_device(case.facts, device, provider=provider.name, launcher=launcher)
        elif isinstance(value, np.ndarray):
            expected[name], given[name] = value.copy(), device.from_numpy(value.copy())
        else:
            expected[name] = given[name] = value
    op.reference(case.facts, **expected)
    launcher(**given)
    device.stream.synchronize()
    for name in case.outputs:
        if hasattr(case.arguments[name], "for_reference"):
            continue  # laid out privately: another op reads it
        error = relative_error(device.to_numpy(given[name]), expected[name])
        limit = op.tolerance(case.facts) if limit is None else limit
        assert error <= limit, f"{op.name} by {provider.name}, {case.name}: {name} off by {error:.2e}"
    return True


def relative_error(actual: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Relative L2 distance; infinities and NaNs must stand in the same places."""
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    odd = ~np.isfinite(b)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(a[~odd]).all():
        return float("inf")
    distance = float(np.linalg.norm(a[~odd] - b[~odd]))
    return distance / max(float(np.linalg.norm(b[~odd])), 1e-30) if distance else 0.0
