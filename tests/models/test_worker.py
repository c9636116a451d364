"""The worker: the same tokens however a step is made up, failures that stay with their request, sampling
parameters that arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pegainfer.runtime.cpu import make_cpu_device
from pegainfer.runtime.dtypes import WeightFormat
from pegainfer.sampling_params import SamplingParams
from pegainfer.worker.graphs import GraphCache
from pegainfer.worker.worker import Worker
from tests.models.decoder_oracle import decoder_logits, log_softmax
from tests.models.tiny_models import CONFIG, MOE_CONFIG, VOCAB, checkpoint, random_weights
from tests.models.worker_driver import (
    GREEDY,
    Driver,
    MemoryCheckpoint,
    golden_worker,
    make_worker,
    prompt_scores,
)

SCORED = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=5)


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = make_worker(checkpoint())
    yield worker
    worker.close()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def alone(
    worker: Worker, tokens: list[int], num_new: int, params: SamplingParams = SCORED, **options: Any
) -> Any:
    """Tokens and log-probabilities of a request that nobody keeps company."""
    driver = Driver(worker)
    driver.add("alone", tokens, params, **options)
    outputs = driver.run("alone", num_new=num_new)
    driver.release("alone")
    driver.step({})
    return [(output.token_id, output.logprobs) for output in outputs]


def test_chunks_do_not_change_a_bit(worker: Worker) -> None:
    tokens = prompt(1, 70)
    whole = alone(worker, tokens, 8)
    for chunk in (1, 7, 16, 33, 69):
        driver = Driver(worker)
        driver.add("chunked", tokens, SCORED)
        outputs = driver.run("chunked", chunk=chunk, num_new=8)
        assert [(o.token_id, o.logprobs) for o in outputs if o.token_id is not None] == whole
        driver.release("chunked")
        driver.step({})


def test_batch_mates_do_not_change_a_bit(worker: Worker) -> None:
    """Decoding requests beside a prefill, requests that come and go, in another order each step."""
    prompts = {f"r{index}": prompt(index, 3 + 11 * index) for index in range(6)}
    expected = {name: alone(worker, tokens, 6) for name, tokens in prompts.items()}
    driver = Driver(worker)
    got: dict[str, list[Any]] = {name: [] for name in prompts}
    waiting = list(prompts)
    rng = np.random.default_rng(5)
    while any(len(outputs) < 6 for outputs in got.values()):
        if waiting:
            driver.add(name := waiting.pop(), prompts[name], SCORED)
        running = [name for name in driver.tokens if len(got[name]) < 6]
        counts = {
            name: min(int(rng.integers(1, 20)), len(driver.tokens[name]) - driver.computed[name])
            for name in rng.permutation(running).tolist()
        }
        for name, output in driver.step(counts).items():
            if output.token_id is not None:
                got[name].append((output.token_id, output.logprobs))
            if len(got[name]) == 6:
                driver.release(name)
    assert got == expected


def test_shared_prefix_does_not_change_a_bit(worker: Worker) -> None:
    tokens = prompt(9, 50)
    expected = alone(worker, tokens, 5)
    driver = Driver(worker)
    driver.add("first", tokens, GREEDY)
    driver.run("first")
    driver.add("second", tokens, SCORED, shared_blocks=driver.blocks["first"][:3])
    outputs = driver.run("second", num_new=5)
    assert [(output.token_id, output.logprobs) for output in outputs] == expected
    assert sum(len(output.prompt_logprobs or []) for output in outputs) == 50 - 1 - 48


def test_resume_after_preemption_does_not_change_a_bit(worker: Worker) -> None:
    tokens = prompt(13, 20)
    expected = alone(worker, tokens, 10)
    driver = Driver(worker)
    driver.add("again", tokens, SCORED)
    before = driver.run("again", num_new=4)
    driver.release("again")
    driver.add("other", prompt(14, 90), GREEDY)  # writes over the blocks
    driver.run("other")
    driver.add("again", driver.tokens["again"], SCORED, num_prompt=20)
    after = driver.run("again", chunk=13, num_new=6)
    outputs = [*before, *after]
    assert [(o.token_id, o.logprobs) for o in outputs if o.token_id is not None] == expected


def test_graphs_are_kept_by_use() -> None:
    device = make_cpu_device(1)
    cache: GraphCache[str] = GraphCache(device, capacity=2)
    ran: list[str] = []

    def forward(name: str) -> Callable[[], str]:
        def record() -> str:
            device.stream.call(lambda: ran.append(name))
            return f"recorded as {name}"

        return record

    def run(key: int, name: str) -> str:
        result = cache.run((key, key, key), forward(name))
        device.stream.synchronize()
        return result

    for key in (1, 2, 3):
        assert run(key, "first") == "recorded as first"  # launched as it is
    assert len(cache) == 0
    ran.clear()
    assert [run(1, "a"), run(2, "b"), run(1, "-")] == ["recorded as a", "recorded as b", "recorded as a"]
    assert run(3, "c") == "recorded as c"  # takes the place of 2
    assert run(1, "-") == "recorded as a"
    assert run(2, "d") == "recorded as d"
    assert ran == ["a", "b", "a", "c", "a", "d"]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.run((9, 9, 9), lambda: str(1 // 0))
    assert run(9, "e") == "recorded as e"
    assert len(cache) == 2
    device.close()


def test_eager_equals_recorded() -> None:
    results = []
    for eager in (False, True):
        worker = make_worker(checkpoint(), enforce_eager=eager)
        results.append(alone(worker, prompt(1, 30), 6))
        worker.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("params", [SCORED, GREEDY], ids=["scored prompt", "plain"])
def test_decode_is_recorded_whatever_was_asked_about_the_prompt(params: SamplingParams) -> None:
    worker = make_worker(checkpoint())
    alone(worker, prompt(1, 30), 6, params)
    graphs: Any = worker._runner._graphs  # type: ignore[attr-defined]
    assert list(graphs._entries) == [(1, 1, 1)]
    worker.close()


@pytest.mark.parametrize(
    "params", [SCORED, SamplingParams(temperature=0.0, logprobs=5)], ids=["scored prompts", "plain"]
)
def test_more_requests_than_one_slice_of_logits(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    monkeypatch.setattr("pegainfer.worker.build._LOGITS_BYTES", 0)
    worker = make_worker(checkpoint(), max_num_seqs=40)
    prompts = {f"r{index}": prompt(index, 2 + index % 5) for index in range(37)}
    driver = Driver(worker)
    for name, tokens in prompts.items():
        driver.add(name, tokens, params)
    together = driver.step({name: len(tokens) for name, tokens in prompts.items()})
    expected = {name: alone(worker, tokens, 1, params)[0] for name, tokens in list(prompts.items())[::6]}
    assert {name: (together[name].token_id, together[name].logprobs) for name in expected} == expected
    worker.close()


@pytest.mark.parametrize("config", [CONFIG, MOE_CONFIG], ids=["dense", "experts"])
def test_the_last_layer_computes_only_what_is_asked_for(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states of other tokens than the last of a request matter to scored prompts alone."""
    worker = make_worker(MemoryCheckpoint(config, random_weights(config, 5)))
    layer: Any = worker._runner._model._layers[-1]  # type: ignore[attr-defined]
    rows: list[int] = []

    def watch(layer_type: type, name: str) -> None:
        original = getattr(layer_type, name)

        def counted(self: Any, residual: Any, *rest: Any) -> None:
            if self is layer.feed_forward:
                rows.append(residual.shape[0])
            original(self, residual, *rest)

        monkeypatch.setattr(layer_type, name, counted)

    watch(type(layer.feed_forward), "__call__")
    prompts = {"long": prompt(51, 40), "short": prompt(52, 5), "unfinished": prompt(53, 30)}
    steps = [{"long": 40, "short": 3, "unfinished": 7}, {"long": 1, "short": 2, "unfinished": 9}]
    answers = []
    for scored in (False, True):
        driver = Driver(worker)
        params = SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=0 if scored else None)
        for name, tokens in prompts.items():
            driver.add(name, tokens, params)
        outputs = [driver.step(counts) for counts in steps]
        answers.append([(o.token_id, o.logprobs) for output in outputs for o in output.values()])
        for name in prompts:
            driver.release(name)
        driver.step({})
    assert answers[0] == answers[1]
    assert [token is not None for token, _ in answers[0]] == [True, False, False, True, True, False]
    assert rows[-4:] == [3, 3, 50, 12]
    worker.close()


def test_prompt_logprobs_are_those_of_the_oracle() -> None:
    source = checkpoint(format=WeightFormat.f32)
    worker = make_worker(source, dtype="float32")
    tokens = prompt(21, 40)
    expected = log_softmax(decoder_logits(CONFIG, source.values(), tokens))
    driver = Driver(worker)
    driver.add("scored", tokens, SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=3))
    driver.add("plain", prompt(22, 12), SamplingParams(temperature=0.0, prompt_logprobs=0))
    outputs = [
        driver.step({"scored": 9, "plain": 12}),
        driver.step({"scored": 30}),
        driver.step({"scored": 1}),
    ]
    scores = prompt_scores(output["scored"] for output in outputs)
    assert [score.token_id for score in scores] == tokens[1:]
    for score, row in zip(scores, expected, strict=False):
        assert score.logprob == pytest.approx(row[score.token_id], abs=1e-4)
        assert score.rank == 1 + np.count_nonzero(row > row[score.token_id])
        assert score.top_ids == np.argsort(-row)[:3].tolist()
        assert score.top_logprobs == pytest.approx(row[score.top_ids], abs=1e-4)
    last = outputs[-1]["scored"].logprobs
    assert last is not None
    assert (last.token_id, last.rank, len(last.top_ids)) == (int(expected[-1].argmax()), 1, 2)
    assert [len(score.top_ids) for score in prompt_scores([outputs[0]["plain"]])] == [0] * 11
    assert outputs[0]["plain"].logprobs is None
    worker.close()


def test_nan_fails_one_request_only() -> None:
    weights = random_weights(CONFIG, 3, head_scale=4.0)
    healthy = MemoryCheckpoint(
        {**CONFIG, "tie_word_embeddings": False},
        {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].copy()},
    )
    broken = {**healthy.values()}
    broken["model.embed_tokens.weight"][17] = np.nan
    worker = make_worker(MemoryCheckpoint(healthy.config, broken))
    tokens = [token for token in prompt(2, 30) if token != 17]
    expected = alone(worker, tokens, 4, GREEDY)
    driver = Driver(worker)
    driver.add("healthy", tokens, GREEDY)
    driver.add("broken", [5, 17, 6], SCORED)
    first = driver.step({"healthy": len(tokens), "broken": 3})
    assert first["broken"].error is not None
    assert "not finite" in first["broken"].error
    assert first["healthy"].error is None
    driver.release("broken")
    more = driver.run("healthy", num_new=3)
    assert [(o.token_id, o.logprobs) for o in [first["healthy"], *more]] == expected
    assert alone(worker, tokens, 4, GREEDY) == expected  # in the blocks that hold NaN
    worker.close()


@pytest.mark.parametrize("bad", [[VOCAB], [-1, 3], [3, 2**31 - 1]])
def test_ids_outside_the_vocabulary_fail_one_request_only(worker: Worker, bad: list[int]) -> None:
    tokens = prompt(2, 9)
    expected = alone(worker, tokens, 1, GREEDY)
    driver = Driver(worker)
    driver.add("bad", bad, GREEDY)
    driver.add("good", tokens, GREEDY)
    outputs = driver.step({"bad": len(bad), "good": 9})
    assert "token ids" in (outputs["bad"].error or "")
    assert (outputs["good"].token_id, outputs["good"].logprobs) == expected[0]
    driver.release("bad")
    driver.release("good")
    driver.step({})


def sampled(worker: Worker, num_new: int = 6, **options: Any) -> list[int]:
    stops = options.pop("stop_token_ids", ())
    params = SamplingParams(**{"temperature": 0.0, **options})
    return [
        token for token, _ in alone(worker, prompt(4, 12), num_new, params, stop_token_ids=stops, seed=11)
    ]


def test_sampling_parameters_arrive(worker: Worker) -> None:
    plain = sampled(worker)
    assert sampled(worker, logit_bias={100: 100.0}) == [100] * 6
    assert sampled(worker, logit_bias={plain[0]: -100.0, VOCAB + 7: 5.0})[0] != plain[0]
    assert set(sampled(worker, allowed_token_ids=(7, 9))) <= {7, 9}
    assert sampled(worker, temperature=1.0, top_k=1) == plain
    assert sampled(worker, temperature=1.5, min_p=1.0) == plain
    assert sampled(worker, temperature=1.5, top_p=1e-6) == plain
    hot = sampled(worker, temperature=2.0)
    assert hot == sampled(worker, temperature=2.0)
    assert hot != plain
    assert len(set(sampled(worker, frequency_penalty=2.0, logit_bias={100: 10.0, 101: 9.9}))) > 1
    assert len(set(sampled(worker, repetition_penalty=1e6, logit_bias={}))) == 6


def test_min_tokens_holds_back_the_end(worker: Worker) -> None:
    tokens = sampled(worker, min_tokens=3, max_tokens=9, logit_bias={8: 100.0}, stop_token_ids=(8,))
    assert 8 not in tokens[:3]
    assert tokens[3:] == [8] * 3


def test_extras_of_one_row_leave_the_others_alone(worker: Worker) -> None:
    expected = sampled(worker, num_new=1)
    driver = Driver(worker)
    params = {
        "a": SamplingParams(temperature=0.0, logit_bias={100: 100.0}),
        "b": GREEDY,
        "c": SamplingParams(temperature=0.0, allowed_token_ids=(9,), repetition_penalty=2.0),
        "d": GREEDY,
    }
    for name, own in params.items():
        driver.add(name, prompt(4, 12), own)
    outputs = driver.step(dict.fromkeys(params, 12))
    assert [outputs[name].token_id for name in params] == [100, expected[0], 9, expected[0]]


def test_undecodable_ids_are_never_sampled() -> None:
    worker = make_worker(checkpoint(), decodable_vocab_size=4)
    assert worker.info.decodable_vocab_size == 4
    assert set(sampled(worker, temperature=2.0, num_new=20)) <= set(range(4))
    worker.close()


@pytest.mark.parametrize("formats", [("q8_0", "q8_0"), ("q4_0", "q4_1"), ("q4_1", "bf16"), ("f16", "f32")])
def test_mixed_formats_in_merged_matrices(formats: tuple[str, str]) -> None:
    """A file may store `k_proj` or `up_proj` otherwise than their neighbours."""
    first, second = (WeightFormat(name) for name in formats)
    config = {**CONFIG, "num_attention_heads": 3, "num_key_value_heads": 1}
    weights = random_weights(config, 3, head_scale=4.0)
    other = {name: second for name in weights if "k_proj" in name or "up_proj" in name}
    source = MemoryCheckpoint(config, weights, format=first, formats=other)
    worker = make_worker(source, max_logprobs=20)
    assert np.mean(errors(worker, source, prompt(6, 40))) < 0.15
    worker.close()


@pytest.mark.parametrize("formats", [("q4_0", "q4_1"), ("q8_0", "q4_0")])
def test_mixed_formats_of_experts(formats: tuple[str, str]) -> None:
    """Experts of a layer share one format: a lossless one where there is one, else a plain one."""
    first, second = (WeightFormat(name) for name in formats)
    weights = random_weights(MOE_CONFIG, 3, head_scale=4.0)
    other = {name: second for name in weights if "down_proj" in name}
    source = MemoryCheckpoint(MOE_CONFIG, weights, format=first, formats=other)
    worker = make_worker(source)
    assert worker.info.weight_format == {"q4_0": "q4_1", "q8_0": "bf16"}[first]
    # The median: where the choice of an expert hangs on rounding, some processors take another one.
    found = [errors(worker, source, prompt(index, 40)) for index in range(6, 10)]
    assert np.median(np.concatenate(found)) < 0.15
    worker.close()


def errors(worker: Worker, source: MemoryCheckpoint, tokens: list[int]) -> np.ndarray[Any, Any]:
    """Absolute errors of the log-probabilities of a prompt."""
    driver = Driver(worker)
    driver.add("scored", tokens, SamplingParams(temperature=0.0, prompt_logprobs=0))
    scores = prompt_scores(driver.run("scored"))
    expected = log_softmax(decoder_logits(source.config, source.values(), tokens))
    assert len(scores) == len(tokens) - 1
    found = [abs(score.logprob - row[score.token_id]) for score, row in zip(scores, expected, strict=False)]
    return np.array(found)


def test_golden_model_serves_from_bfloat16_too() -> None:
    worker = golden_worker("qwen3_moe", dtype="auto")
    assert (worker.info.dtype, worker.info.weight_format) == ("bfloat16", "bf16")
    assert alone(worker, [1, 2, 3], 3)
    worker.close()
