"""Sampling on the device: launches the sampling ops over slices of logits and reads what they yield.

Knows nothing of scheduling; a row is whatever `InputBatch` gave to a request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.errors import ConfigError, KernelError
from pegainfer.ops.feed import FeedTokensFacts, feed_tokens
from pegainfer.ops.op import Launcher, bind
from pegainfer.ops.sampling import SamplingFacts, sample, token_logprobs
from pegainfer.runtime.device import Device, Download
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.worker.input_batch import InputBatch
from pegainfer.worker.sampling_inputs import SamplingInputs, slice_arguments
from pegainfer.worker.staging import StagingBuffer

__all__ = ["SampledDownload", "Sampler", "SamplingStep", "ScoredDownload", "ScoredTokens"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Device arrays with the log-probability and rank of one token per row, and of the most likely ones."""

    logprobs: Tensor  # float32 [rows]
    ranks: Tensor  # int32 [rows]
    top_ids: Tensor  # int32 [rows, width]
    top_logprobs: Tensor  # float32 [rows, width]

    @classmethod
    def empty(cls, device: Device, num_rows: int, width: int) -> ScoredTokens:
        """Uninitialised arrays for up to `width` alternatives per row."""
        return cls(
            device.empty((num_rows,), DType.float32),
            device.empty((num_rows,), DType.int32),
            device.empty((num_rows, width), DType.int32),
            device.empty((num_rows, width), DType.float32),
        )

    def arguments(self, start: int, stop: int) -> dict[str, Tensor]:
        """The rows `[start, stop)` as arguments of the ops that write them."""
        return {
            "logprobs": self.logprobs.slice(0, start, stop),
            "ranks": self.ranks.slice(0, start, stop),
            "top_ids": self.top_ids.slice(0, start, stop),
            "top_logprobs": self.top_logprobs.slice(0, start, stop),
        }

    def first_rows(self, count: int) -> tuple[Tensor, ...]:
        """The arrays of the first `count` rows, in the order of the fields."""
        arrays = (self.logprobs, self.ranks, self.top_ids, self.top_logprobs)
        return tuple(array.rows(count) for array in arrays)


def _token_logprobs(arrays: list[Array], token_ids: list[int], nums: list[int]) -> list[TokenLogprobs | None]:
    """Host copies of `ScoredTokens.first_rows` as token `token_ids[i]` with `nums[i]` alternatives, None
    where that is negative.
    """
    logprobs, ranks, ids, values = arrays
    return [
        TokenLogprobs(
            token, float(logprobs[i]), int(ranks[i]), ids[i, :num].tolist(), values[i, :num].tolist()
        )
        if num >= 0
        else None
        for i, (token, num) in enumerate(zip(token_ids, nums, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class ScoredDownload:
    """Log-probabilities of given tokens, under way to the host."""

    download: Download
    token_ids: list[int]
    num_logprobs: list[int]

    def wait(self) -> list[TokenLogprobs | None]:
        """One a token; None where none was asked for."""
        return _token_logprobs(self.download.wait(), self.token_ids, self.num_logprobs)


@dataclass(frozen=True, slots=True)
class SampledDownload:
    """Sampled tokens and their log-probabilities, under way to the host."""

    download: Download
    num_logprobs: Array

    def wait(self) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Token (-1: none could be chosen) and log-probabilities of each row."""
        sampled, *scored = self.download.wait()
        token_ids: list[int] = sampled.tolist()
        if not scored:
            return token_ids, [None] * len(token_ids)
        return token_ids, _token_logprobs(scored, token_ids, self.num_logprobs.tolist())


@dataclass(frozen=True, slots=True)
class SamplingStep:
    """One step's sampling under way: the launcher, its arguments by row, and where results appear."""

    num_rows: int
    launch: Launcher
    arguments: dict[str, Tensor | None]
    scored: ScoredTokens
    num_logprobs: Array


class Sampler:
    """Binds the sampling ops for up to `max_num_seqs` rows, whose inputs travel in `staging`.

    At most `max_logprobs` alternatives are the common case; without that limit (-1) a row may ask for the
    whole vocabulary, at the price of larger result arrays in its steps.
    """

    def __init__(
        self,
        device: Device,
        staging: StagingBuffer,
        *,
        vocab_size: int,
        decodable_vocab_size: int,
        max_num_seqs: int,
        max_logprobs: int,
        max_steps_in_flight: int = 1,
    ) -> None:
        self.inputs = SamplingInputs(
            device, staging, vocab_size=vocab_size, max_num_seqs=max_num_seqs, copies=max_steps_in_flight
        )
        self._device = device
        self._sizes = (vocab_size, decodable_vocab_size)
        self._max_num_seqs = max_num_seqs
        self._width = min(max_logprobs if max_logprobs > 0 else 20, vocab_size)
        self._launchers: dict[int, tuple[Launcher, Launcher]] = {}
        try:
            self._bind(self._width)
            if max_logprobs < 0:
                self._bind(vocab_size)
        except KernelError:
            raise ConfigError(
                f"--max-logprobs {max_logprobs} is more than this device can return in a step: lower it"
            ) from None
        self._feed = bind(feed_tokens, FeedTokensFacts(), device)
        self._sampled = device.zeros((max_num_seqs,), DType.int32)
        self._scored = ScoredTokens.empty(device, max_num_seqs, self._width)

    def feed(self, token_ids: Tensor) -> None:
        """Enqueue the replacement, in int32 `[T]`, of tokens that are pending; see `ops.feed`."""
        self._feed(token_ids=token_ids, sampled=self._sampled)

    def begin(self, rows: Array, batch: InputBatch) -> SamplingStep:
        """Prepare a step in which `rows` sample, in this order: writes to the staging, before its upload."""
        arguments, nums = self.inputs.gather(rows, batch, self.feed)
        width = self._width_for(int(nums.max(initial=0)))
        scored = self._scored
        if width > self._width:
            scored = ScoredTokens.empty(self._device, len(rows), width)
        return SamplingStep(len(rows), self._bind(width)[0], arguments, scored, nums)

    def sample(self, step: SamplingStep, logits: Tensor, *, start: int = 0) -> None:
        """Enqueue the sampling of the step's rows from `start` on; `logits` may be overwritten."""
        stop = start + logits.shape[0]
        step.launch(
            logits=logits,
            sampled=self._sampled.slice(0, start, stop),
            **slice_arguments(step.arguments, start, stop),
            **step.scored.arguments(start, stop),
        )

    def download(self, step: SamplingStep) -> SampledDownload:
        """Send what the step yielded to the host, once all its rows have been sampled."""
        tensors = [self._sampled.rows(step.num_rows)]
        if step.num_logprobs.max(initial=-1) >= 0:
            tensors += step.scored.first_rows(step.num_rows)
        return SampledDownload(self._device.download(tensors), step.num_logprobs)

    def begin_scores(self, num_rows: int, num_logprobs: int) -> ScoredTokens:
        """Arrays for the log-probabilities of `num_rows` given tokens with `num_logprobs` alternatives."""
        return ScoredTokens.empty(self._device, num_rows, self._width_for(num_logprobs))

    def download_scores(
        self, scored: ScoredTokens, token_ids: list[int], num_logprobs: list[int]
    ) -> ScoredDownload:
        """Send the scores of `token_ids`, with `num_logprobs` alternatives each, to the host."""
        download = self._device.download(scored.first_rows(len(token_ids)))
        return ScoredDownload(download, token_ids, num_logprobs)

    def score(
        self, logits: Tensor, targets: Tensor, scored: ScoredTokens, *, start: int, num_logprobs: int
    ) -> None:
        """Enqueue the scoring of `targets` int32 `[rows]` into the rows of `scored` from `start` on."""
        _, launch = self._bind(scored.top_ids.shape[1])
        launch(
            logits=logits,
            targets=targets,
            num_logprobs=num_logprobs,
            **scored.arguments(start, start + logits.shape[0]),
        )

    def _width_for(self, num_logprobs: int) -> int:
        return self._width if num_logprobs <= self._width else self._sizes[0]

    def _bind(self, width: int) -> tuple[Launcher, Launcher]:
        launchers = self._launchers.get(width)
        if launchers is None:
            vocab_size, decodable = self._sizes
            facts = SamplingFacts(vocab_size, decodable, width)
            launchers = bind(sample, facts, self._device), bind(token_logprobs, facts, self._device)
            self._launchers[width] = launchers
        return launchers
