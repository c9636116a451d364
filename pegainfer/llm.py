"""`LLM`: the offline API, in the shape of vLLM's. The engine runs in this process; no server, no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tqdm import tqdm

from pegainfer.config import EngineConfig
from pegainfer.engine.build import build_engine_core
from pegainfer.engine.defaults import sampling_defaults
from pegainfer.engine.inputs import RequestLimits, make_requests
from pegainfer.engine.interrupts import interrupts_deferred
from pegainfer.engine.launch import located, tokenizer_of, vocabulary_of
from pegainfer.engine.messages import AddRequest, EngineInfo, RequestUpdate
from pegainfer.engine.output import Collector, OutputDelta, OutputProcessor
from pegainfer.errors import ConfigError, EngineDeadError, RequestError
from pegainfer.log import get_logger
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.tokenizer.chat_template import ChatTemplate, read_template
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["LLM", "CompletionOutput", "Logprob", "Prompt", "RequestOutput", "RequestTimes"]

logger = get_logger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or `{"prompt": text}` or `{"prompt_token_ids": ids}`, the mappings optionally with
`cache_salt`.
"""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability, its rank (1 = most likely) and its text (None without a tokenizer)."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Seconds in the queue, to the first token, and from there to the last; and preemptions."""

    queued_s: float
    prefill_s: float
    decode_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. `logprobs` maps, for each token, ids to log-probabilities, its own id first."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: str | int | None

    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt. The first of `prompt_logprobs` is None: nothing precedes the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestTimes | None
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class _Choice:
    """One engine request and what becomes of it."""

    request: AddRequest
    processor: OutputProcessor
    output: Collector


@dataclass(frozen=True, slots=True)
class _Job:
    """One prompt, checked and tokenised."""

    text: str | None
    token_ids: list[int]
    choices: list[_Choice]


class LLM:
    """A model, ready to generate. `options` are the engine's flags with underscores (`max_model_len=2048`).

    Raises `PegaInferError` with a sentence when the model cannot be served. Use it as a context manager, or
    call `close`. Not safe to use from several threads.
    """

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        self._config = located(EngineConfig.from_flat(model=model, **options))
        self._tokenizer = tokenizer_of(self._config)
        self._core = build_engine_core(self._config, lambda: vocabulary_of(self._tokenizer))
        self._limits = RequestLimits.of(self._config, self._core.info)
        self._defaults = sampling_defaults(self._core.info.generation_config)
        self._template = read_template(self._config.model.chat_template)
        self._num_prompts = 0
        self._is_closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """What was decided at start."""
        return self._core.info

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises `ConfigError` with `skip_tokenizer_init`."""
        if self._tokenizer is None:
            raise ConfigError("the model was loaded with skip_tokenizer_init, so there is no tokenizer")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` takes when it is given none: the model's own defaults."""
        return SamplingParams(**self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, all of them together; outputs come in the order of the prompts.

        `sampling_params` and `priority` hold for all prompts or one for each. Raises `RequestError` before
        anything runs when any prompt cannot be served.
        """
        listed = _as_prompts(prompts)
        jobs = self._jobs([self._tokenise(prompt) for prompt in listed], sampling_params, priority)
        return self._collect(jobs, use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of OpenAI messages) or several (a list of lists)."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        override = self._template if chat_template is None else read_template(chat_template)
        template = ChatTemplate(self.get_tokenizer(), override=override)
        rendered = [
            template.render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        jobs = self._jobs([(chat.text, chat.token_ids, None) for chat in rendered], sampling_params, None)
        return self._collect(jobs, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[OutputDelta]:
        """Complete one prompt piece by piece (`n` must be 1). Closing the iterator stops the request."""
        params = sampling_params or self.get_default_sampling_params()
        if params.n != 1:
            raise RequestError("stream gives one answer; n must be 1", param="n")
        return self._stream(self._jobs([self._tokenise(prompt)], params, None))

    def reset_prefix_cache(self) -> None:
        """Forget the cached keys and values of earlier prompts."""
        self._core.reset_prefix_cache()

    def close(self) -> None:
        """Free the model. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._core.close()

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """Text, ids and cache salt of a prompt."""
        salt: str | None = None
        if isinstance(prompt, Mapping):
            salt = prompt.get("cache_salt")
            body = prompt.get("prompt_token_ids", prompt.get("prompt"))
            if body is None:
                raise RequestError("a prompt mapping needs `prompt` or `prompt_token_ids`", param="prompt")
            text = prompt.get("prompt")
            if not isinstance(body, str):
                return text, list(body), salt
            prompt = body
        if not isinstance(prompt, str):
            return None, list(prompt), salt
        return prompt, self.get_tokenizer().encode(prompt), salt

    def _jobs(
        self,
        prompts: list[tuple[str | None, list[int], str | None]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
    ) -> list[_Job]:
        """Check everything before anything runs."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        priority = [0] * len(prompts) if priority is None else priority
        if not len(prompts) == len(sampling_params) == len(priority):
            raise RequestError(
                f"{len(prompts)} prompts, {len(sampling_params)} sampling params and {len(priority)} "
                "priorities do not match"
            )
        arrival = time.time()
        jobs = []
        for (text, ids, salt), params, rank in zip(prompts, sampling_params, priority, strict=True):
            requests = make_requests(
                str(self._num_prompts),
                ids,
                params,
                limits=self._limits,
                priority=rank,
                cache_salt=salt,
                arrival_time=arrival,
            )
            self._num_prompts += 1
            choices = [
                _Choice(request, OutputProcessor(request.params, self._tokenizer), Collector())
                for request in requests
            ]
            jobs.append(_Job(text, ids, choices))
        return jobs

    def _stream(self, jobs: list[_Job]) -> Iterator[OutputDelta]:
        for _, delta in self._run(jobs):
            if delta.error is not None:
                raise delta.error
            yield delta

    def _collect(self, jobs: list[_Job], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        """Run everything to its end, behind a progress bar of prompts."""
        left = [len(job.choices) for job in jobs]
        with _progress(use_tqdm, len(jobs)) as bar:
            start, num_input, num_output = time.perf_counter(), 0, 0
            for index, delta in self._run(jobs):
                num_output += len(delta.token_ids)
                if delta.error is not None:
                    logger.error("prompt %d failed: %s", index, delta.error)
                left[index] -= delta.finish_reason is not None
                if delta.finish_reason is not None and not left[index]:
                    num_input += len(jobs[index].token_ids)
                    seconds = time.perf_counter() - start
                    bar.set_postfix_str(
                        f"est. speed input: {num_input / seconds:.2f} toks/s, "
                        f"output: {num_output / seconds:.2f} toks/s",
                        refresh=False,
                    )
                    bar.update(1)
        return [self._output(job) for job in jobs]

    def _run(self, jobs: list[_Job]) -> Iterator[tuple[int, OutputDelta]]:
        """Step until every request has ended: each delta with the index of its job. What is left when the
        caller stops is aborted.
        """
        if self._is_closed:
            raise EngineDeadError("the LLM was closed, or its engine failed")
        core = self._core
        running = {
            choice.request.request_id: (index, choice)
            for index, job in enumerate(jobs)
            for choice in job.choices
        }
        try:
            for _, choice in running.values():
                core.add(choice.request)
            while running:
                for update in self._step():
                    if update.request_id not in running:
                        continue  # ended by a stop string
                    index, choice = running[update.request_id]
                    delta = choice.processor.push(update)
                    choice.output.add(delta)
                    if delta.finish_reason is not None:
                        del running[update.request_id]
                    if delta.ends_early:
                        core.abort([update.request_id])
                    yield index, delta
        finally:
            if not self._is_closed:
                core.abort(running)

    def _step(self) -> list[RequestUpdate]:
        with interrupts_deferred():
            try:
                return self._core.step()
            except Exception:
                self.close()
                raise

    def _output(self, job: _Job) -> RequestOutput:
        first = job.choices[0]
        last = first.processor.last_update
        times = None
        if last is not None:
            times = RequestTimes(last.queued_s, last.prefill_s, last.decode_s, last.num_preemptions)
        scored = first.output.prompt_logprobs
        return RequestOutput(
            request_id=first.request.request_id.partition(".")[0],
            prompt=job.text,
            prompt_token_ids=job.token_ids,
            prompt_logprobs=None if scored is None else [None, *map(self._logprobs, scored)],
            outputs=[self._completion(index, choice.output) for index, choice in enumerate(job.choices)],
            finished=True,
            metrics=times,
            num_cached_tokens=first.processor.num_cached_tokens,
        )

    def _completion(self, index: int, output: Collector) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=output.text,
            token_ids=output.token_ids,
            cumulative_logprob=output.cumulative_logprob,
            logprobs=None if output.logprobs is None else list(map(self._logprobs, output.logprobs)),
            finish_reason=None if output.finish_reason is None else output.finish_reason.value,
            stop_reason=output.stop_reason,
        )

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token that stands there first, then the most likely ones."""
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, self._token_text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            found.setdefault(token_id, Logprob(logprob, rank, self._token_text(token_id)))
        return found

    def _token_text(self, token_id: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.token_text(token_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _progress(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    """The bar that people know from vLLM; `use_tqdm` may be a class like `tqdm`."""
    make = use_tqdm if callable(use_tqdm) else tqdm
    return make(
        total=total,
        desc="Processed prompts",
        dynamic_ncols=True,
        postfix="est. speed input: 0.00 toks/s, output: 0.00 toks/s",
        disable=not use_tqdm,
    )
