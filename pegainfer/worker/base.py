"""What the engine asks of a worker. Implementations: `worker.Worker` (one rank) and `sim.SimulatedWorker`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from pegainfer.scheduler.plan import StepOutput, StepPlan

__all__ = ["Worker", "WorkerInfo"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker decided while it was built.

    `vocab_size` is the width of the logits, `decodable_vocab_size` bounds the ids that may be sampled.
    `num_blocks` KV blocks of `block_size` tokens exist, ids 0 to `num_blocks - 1`. `max_model_len` and the
    most tokens of a step, and of one that also decodes, are resolved. `max_steps_in_flight` is how many plans
    may be submitted before the first must be collected (1: none overlaps). `phases` maps start-up phases to
    seconds.
    """

    architecture: str
    device_name: str
    dtype: str
    weight_format: str
    weight_bytes: int
    num_parameters: int
    vocab_size: int
    decodable_vocab_size: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    block_size: int
    num_blocks: int
    kv_cache_bytes: int
    max_steps_in_flight: int = 1
    phases: dict[str, float] = field(default_factory=dict)


class Worker(Protocol):
    """One rank that executes step plans in the order in which they are submitted."""

    @property
    def info(self) -> WorkerInfo: ...

    def submit(self, plan: StepPlan) -> None:
        """Start a step. Up to `info.max_steps_in_flight` may be in flight."""
        ...

    def collect(self) -> StepOutput:
        """Wait for the oldest submitted step and return what it yielded."""
        ...

    def close(self) -> None:
        """Free the device; nothing may be submitted afterwards."""
        ...
