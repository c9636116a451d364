"""`Worker`: one rank. Turns a `StepPlan` into device work and what it yields into a `StepOutput`."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np

from pegainfer.runtime.device import Device, Download
from pegainfer.runtime.tensor import Tensor
from pegainfer.scheduler.plan import NewRequest, SampledToken, StepOutput, StepPlan, TokenLogprobs
from pegainfer.worker.base import WorkerInfo
from pegainfer.worker.input_batch import InputBatch, IntArray, StepLayout
from pegainfer.worker.model_runner import ModelRunner, StepResult
from pegainfer.worker.sampler import SampledDownload, Sampler, SamplingStep, ScoredDownload

__all__ = ["Worker"]

_NO_TOKEN = (
    "the model gave no token to choose: its logits are not finite or every token was excluded by the request"
)
_NOT_FINITE = "the log-probabilities of the prompt are not finite"


@dataclass(frozen=True, slots=True)
class _SampledTokens:
    """What the rows of a step sample, and where in the rows these tokens belong."""

    download: SampledDownload
    rows: IntArray
    positions: IntArray


@dataclass(frozen=True, slots=True)
class _PromptScores:
    """Which prompt tokens a step scores: those of request `i` of the step are the next `counts[i]` rows."""

    download: ScoredDownload
    counts: dict[int, int]


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step whose results are under way; `done` when it has none."""

    plan: StepPlan
    layout: StepLayout | None = None
    sampled: _SampledTokens | None = None
    prompt: _PromptScores | None = None
    done: Download | None = None


class Worker:
    """Implements `worker.base.Worker` on one device.

    With two steps in flight the second is launched before the tokens of the first have reached the host: it
    takes them from where the first one's sampling leaves them. With three, tokens could be pending from two
    samplings at once, which is why there are not more.
    """

    def __init__(
        self, runner: ModelRunner, sampler: Sampler, batch: InputBatch, *, device: Device, info: WorkerInfo
    ) -> None:
        self._runner = runner
        self._sampler = sampler
        self._batch = batch
        self._device = device
        self._info = info
        self._in_flight: deque[_InFlight] = deque()
        self._errors: dict[int, str] = {}
        self._prompt_logprobs: dict[int, int] = {}

    @property
    def info(self) -> WorkerInfo:
        """What was decided while the worker was built."""
        return self._info

    def submit(self, plan: StepPlan) -> None:
        """Enqueue a step."""
        if len(self._in_flight) >= self._info.max_steps_in_flight:
            raise RuntimeError("a step was submitted before the oldest one was collected")
        for request_id in plan.released:
            self._forget(request_id)
        for request in plan.new_requests:
            self._add(request)
        self._in_flight.append(self._launch(plan) if plan.scheduled else _InFlight(plan))

    def collect(self) -> StepOutput:
        """Wait for the oldest step and return what it yielded."""
        step = self._in_flight.popleft()
        if step.layout is None:
            return StepOutput(step.plan.step_id, [])
        if step.done is not None:
            step.done.wait()
        return StepOutput(step.plan.step_id, self._results(step, step.layout))

    def rehearse(self) -> None:
        """Do before the first request what it would have to wait for: measure what the device does not know
        yet about this model, and record decode steps.
        """
        self._device.tune(self._runner.rehearse, self._info.max_num_batched_tokens)
        self._device.stream.synchronize()
        self._runner.record()

    def close(self) -> None:
        """Free the device."""
        self._in_flight.clear()
        self._device.close()

    def _add(self, request: NewRequest) -> None:
        self._forget(request.request_id)
        error = self._problem(request)
        if error is not None:
            # The engine checks ids; should one slip through, its request runs on harmless ones and fails.
            request = NewRequest(
                request.request_id,
                [0] * len(request.token_ids),
                request.num_prompt_tokens,
                request.params,
                request.seed,
            )
        row = self._batch.add(request)
        self._sampler.inputs.add(row, request)
        if error is not None:
            self._errors[row] = error
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs[row] = self._sampler.inputs.width_of(request.params.prompt_logprobs)

    def _problem(self, request: NewRequest) -> str | None:
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or high >= self._info.vocab_size:
            return f"token ids must be in [0, {self._info.vocab_size}), got {low if low < 0 else high}"
        return None

    def _forget(self, request_id: str) -> None:
        row = self._batch.remove(request_id)
        if row is not None:
            self._errors.pop(row, None)
            self._prompt_logprobs.pop(row, None)

    def _launch(self, plan: StepPlan) -> _InFlight:
        layout = self._batch.prepare(plan.scheduled, self._runner.staging)
        scores = self._scores_prompts(layout)
        # Before the forward: all inputs of the step travel in one copy.
        rows = layout.rows[layout.sampling]
        sampling = self._sampler.begin(rows, self._batch) if len(rows) else None
        result = self._runner.forward(layout, self._sampler.feed, needs_all=scores)
        sampled = self._sample(sampling, rows, result) if sampling is not None else None
        prompt = self._score_prompts(layout, result.hidden) if scores else None
        done = self._device.download([]) if sampled is None and prompt is None else None
        return _InFlight(plan, layout, sampled, prompt, done)

    def _sample(self, step: SamplingStep, rows: IntArray, result: StepResult) -> _SampledTokens:
        """Enqueue the sampling of `rows`; their tokens are pending from now on."""
        if result.logits is not None:
            self._sampler.sample(step, result.logits)
        else:
            self._sample_slices(result.hidden, step)
        return _SampledTokens(self._sampler.download(step), rows, self._batch.append_pending(rows))

    def _sample_slices(self, hidden: Tensor, sampling: SamplingStep) -> None:
        self._runner.each_logits(
            hidden,
            "sampled_rows",
            sampling.num_rows,
            lambda logits, start: self._sampler.sample(sampling, logits, start=start),
        )

    def _scores_prompts(self, layout: StepLayout) -> bool:
        """Whether the step computes positions of a prompt whose log-probabilities were asked for; the last
        position of a prompt belongs to the answer.
        """
        if not self._prompt_logprobs:
            return False
        ends = self._batch.num_prompt_tokens[layout.rows] - 1
        in_prompt = layout.rows[layout.starts < ends]
        return any(row in self._prompt_logprobs for row in in_prompt.tolist())

    def _score_prompts(self, layout: StepLayout, hidden: Tensor) -> _PromptScores | None:
        """Enqueue the scoring of the prompt tokens that follow the computed positions."""
        host = self._runner.staging.host
        counts: dict[int, int] = {}
        nums: list[int] = []
        total = 0
        for index, row in enumerate(layout.rows.tolist()):
            width = self._prompt_logprobs.get(row)
            if width is None:
                continue
            start, offset = int(layout.starts[index]), int(layout.offsets[index])
            count = min(int(layout.counts[index]), int(self._batch.num_prompt_tokens[row]) - 1 - start)
            if count <= 0:
                continue
            host["scored_rows"][total : total + count] = np.arange(offset, offset + count)
            host["scored_tokens"][total : total + count] = self._batch.tokens[
                row, start + 1 : start + 1 + count
            ]
            counts[index] = count
            nums += [width] * count
            total += count
        if not counts:
            return None
        widest = max(nums)
        self._runner.staging.upload(layout.num_requests)
        scored = self._sampler.begin_scores(total, widest)
        targets = self._runner.staging.tensors["scored_tokens"]

        def score(logits: Tensor, start: int) -> None:
            stop = start + logits.shape[0]
            self._sampler.score(
                logits, targets.slice(0, start, stop), scored, start=start, num_logprobs=widest
            )

        self._runner.each_logits(hidden, "scored_rows", total, score)
        token_ids = host["scored_tokens"][:total].tolist()
        return _PromptScores(self._sampler.download_scores(scored, token_ids, nums), counts)

    def _results(self, step: _InFlight, layout: StepLayout) -> list[SampledToken]:
        tokens, logprobs = self._sampled(step, layout)
        prompts = self._prompt_results(step.prompt) if step.prompt is not None else {}
        results = []
        for index, entry in enumerate(step.plan.scheduled):
            token_id, prompt = tokens.get(index), prompts.get(index)
            error = self._error(int(layout.rows[index]), token_id, prompt)
            if error is None:
                results.append(SampledToken(entry.request_id, token_id, logprobs.get(index), prompt))
            else:
                results.append(SampledToken(entry.request_id, error=error))
        return results

    def _error(self, row: int, token_id: int | None, prompt: list[TokenLogprobs] | None) -> str | None:
        """Why the request of a row fails with this step, if it does."""
        if row in self._errors:
            return self._errors[row]
        if token_id is not None and token_id < 0:
            return _NO_TOKEN
        if prompt is not None and not all(math.isfinite(score.logprob) for score in prompt):
            return _NOT_FINITE
        return None

    def _sampled(
        self, step: _InFlight, layout: StepLayout
    ) -> tuple[dict[int, int], dict[int, TokenLogprobs | None]]:
        """Tokens and log-probabilities by index in the step; the tokens become known to their rows."""
        if step.sampled is None:
            return {}, {}
        token_ids, logprobs = step.sampled.download.wait()
        # A row without a token fails; whatever stands there instead matters to nobody.
        known = np.maximum(np.array(token_ids, np.int64), 0)
        self._batch.resolve(step.sampled.rows, step.sampled.positions, known)
        indices = layout.sampling.tolist()
        return dict(zip(indices, token_ids, strict=True)), dict(zip(indices, logprobs, strict=True))

    def _prompt_results(self, prompt: _PromptScores) -> dict[int, list[TokenLogprobs]]:
        scores = iter(prompt.download.wait())
        return {
            index: [score for score in islice(scores, count) if score is not None]
            for index, count in prompt.counts.items()
        }
