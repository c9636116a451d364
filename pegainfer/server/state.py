"""What the routes know of the server: whether it loads, serves, drains or has lost its engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prometheus_client import CollectorRegistry

from pegainfer.config import ServerOptions
from pegainfer.engine.client import EngineHealth
from pegainfer.engine.metrics import EngineMetrics
from pegainfer.server.protocol.errors import unavailable
from pegainfer.server.serving import Serving

__all__ = ["ServerPhase", "ServerState"]


class ServerPhase(StrEnum):
    """Where the server is in its life."""

    loading = "loading"
    serving = "serving"
    draining = "draining"
    dead = "dead"


@dataclass(slots=True)
class ServerState:
    """Shared by the routes and the process that runs them. `serving` is there once the model is loaded."""

    options: ServerOptions
    metrics: EngineMetrics
    registry: CollectorRegistry
    phase: ServerPhase = ServerPhase.loading
    serving: Serving | None = None
    num_calls: int = 0

    def need_serving(self) -> Serving:
        """The model, for a call that wants it now. Raises `RequestError` (503)."""
        if self.phase is not ServerPhase.serving or self.serving is None:
            raise unavailable(f"the server is {_REASONS[self.phase]}")
        return self.serving

    def health(self) -> str:
        """`healthy`, or why the server cannot serve."""
        if self.phase is not ServerPhase.serving or self.serving is None:
            return self.phase.value
        return self.serving.client.health(self.options.health_stall_timeout).value

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served and move."""
        return self.health() == EngineHealth.healthy

    def report(self) -> dict[str, Any]:
        """What `/health?verbose=1` tells."""
        report: dict[str, Any] = {"status": self.health(), "open_calls": self.num_calls}
        if self.serving is not None:
            stats = self.serving.client.stats
            report |= {
                "running": stats.num_running,
                "waiting": stats.num_waiting,
                "kv_cache_usage": stats.kv_cache_usage,
                "steps": stats.step_id,
            }
        return report


_REASONS = {
    ServerPhase.loading: "still loading the model",
    ServerPhase.draining: "shutting down",
    ServerPhase.dead: "out of order: its engine is gone",
}
