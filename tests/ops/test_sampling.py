"""What sampling promises: its random source, its filters, its penalties, and independence of batch mates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import pegainfer.kernels.sampling.cpu  # noqa: F401
from pegainfer.ops.op import bind
from pegainfer.ops.philox import philox4x32, uniform
from pegainfer.ops.sampling import SamplingFacts, sample, token_logprobs
from tests.ops.native import LEVELS, device_of

Array = np.ndarray[Any, Any]
Run = Callable[..., dict[str, Array]]

MAX_TOP = 8
_INT32 = {"top_k", "num_logprobs", "prompt_lens"}
_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence": 0.0,
    "frequency": 0.0,
    "repetition": 1.0,
    "num_logprobs": -1,
    "prompt_lens": 0,
}


def arguments(
    logits: Array,
    *,
    history: list[list[int]] | None = None,
    bias: list[dict[int, float]] | None = None,
    allowed: list[list[int]] | None = None,
    seeds: Array | int = 0,
    counters: Array | int = 0,
    **settings: Any,
) -> dict[str, Any]:
    """The arguments of `sample`; every setting is one value for all rows or one a row."""
    rows, vocab_size = logits.shape
    history, bias = history or [[]] * rows, bias or [{}] * rows
    mask = None
    if allowed is not None:
        mask = np.zeros((rows, -(-vocab_size // 32)), np.uint32)
        for r, ids in enumerate(allowed):
            for token in ids:
                mask[r, token // 32] |= np.uint32(1 << token % 32)
    return {
        "logits": logits.astype(np.float32),
        **{
            name: np.broadcast_to(
                np.asarray(settings.get(name, default), np.int32 if name in _INT32 else np.float32), rows
            ).copy()
            for name, default in _DEFAULTS.items()
        },
        "seeds": np.broadcast_to(np.asarray(seeds, np.uint64), rows).copy(),
        "counters": np.broadcast_to(np.asarray(counters, np.int64), rows).copy(),
        "history": np.array([token for row in history for token in row], np.int32),
        "history_start": np.cumsum([0, *map(len, history)]).astype(np.int32),
        "bias_ids": np.array([token for row in bias for token in row], np.int32),
        "bias_values": np.array([value for row in bias for value in row.values()], np.float32),
        "bias_start": np.cumsum([0, *map(len, bias)]).astype(np.int32),
        "allowed": mask,
        "sampled": np.full(rows, -7, np.int32),
        "logprobs": np.full(rows, 7, np.float32),
        "ranks": np.full(rows, 7, np.int32),
        "top_ids": np.full((rows, MAX_TOP), 7, np.int32),
        "top_logprobs": np.full((rows, MAX_TOP), 7, np.float32),
    }


def run_with(implementation: str, given: dict[str, Any], decodable: int | None = None) -> dict[str, Array]:
    """The outputs of the reference, or of a level with a number of threads (`avx2:2`)."""
    vocab_size = given["logits"].shape[1]
    facts = SamplingFacts(vocab_size, decodable or vocab_size, MAX_TOP)
    given = copy.deepcopy(given)
    if implementation == "reference":
        sample.reference(facts, **given)
    else:
        level, threads = implementation.split(":")
        device = device_of(level, int(threads))
        tensors = {k: device.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
        bind(sample, facts, device)(**tensors)
        device.stream.synchronize()
    return {name: given[name] for name in ("sampled", "logprobs", "ranks", "top_ids", "top_logprobs")}


@pytest.fixture(params=["reference", *(f"{level}:2" for level in LEVELS)])
def run(request: pytest.FixtureRequest) -> Run:
    """`run(logits, **settings)` gives the outputs of one implementation."""

    def call(logits: Array, *, decodable: int | None = None, **settings: Any) -> dict[str, Array]:
        return run_with(request.param, arguments(np.atleast_2d(logits), **settings), decodable)

    return call


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter: Any, key: Any, words: Any) -> None:
    assert philox4x32(counter, key) == words


def test_uniform_uses_the_first_two_words() -> None:
    assert uniform(0, 0) == (0x6627E8D5E169C58D >> 11) / 2**53
    assert uniform(2**64 - 1, 1) == uniform(-1, 1)
    assert 0.0 <= min(uniform(7, i) for i in range(1000)) < 0.01


@pytest.mark.parametrize("level", LEVELS)
def test_compiled_philox_is_the_same(level: str) -> None:
    """Over 2**14 equally likely ids the sampled id is the leading 14 bits of the draw."""
    rng = np.random.default_rng(1)
    seeds = rng.integers(0, 1 << 64, 50, np.uint64)
    counters = rng.integers(0, 1 << 62, 50)
    given = arguments(np.zeros((50, 1 << 14)), seeds=seeds, counters=counters)
    expected = [int(uniform(int(s), int(c)) * 2**14) for s, c in zip(seeds, counters, strict=True)]
    assert run_with(f"{level}:2", given)["sampled"].tolist() == expected


@pytest.mark.parametrize("vocab_size", [50, 5003])
@pytest.mark.parametrize("level", LEVELS)
def test_a_row_does_not_depend_on_its_batch(level: str, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    rows = 24
    logits = rng.normal(0, 3, (rows, vocab_size)).astype(np.float32)
    settings: dict[str, Any] = {
        "temperature": rng.choice([0, 0.5, 1.5], rows),
        "top_k": rng.choice([0, 5, 40], rows),
        "top_p": rng.choice([0.5, 0.95, 1.0], rows),
        "min_p": rng.choice([0, 0.02], rows),
        "repetition": rng.choice([1, 1.2], rows),
        "frequency": rng.choice([0, 0.2], rows),
        "num_logprobs": rng.choice([-1, 0, 3], rows),
        "prompt_lens": np.full(rows, 4),
        "seeds": np.arange(rows),
        "counters": np.arange(rows) % 5,
    }
    history = rng.integers(0, vocab_size, (rows, 10)).tolist()
    bias = [{int(token): 2.5 for token in rng.choice(vocab_size, r % 3, replace=False)} for r in range(rows)]
    together = run_with(f"{level}:2", arguments(logits, history=history, bias=bias, **settings))
    one_thread = run_with(f"{level}:1", arguments(logits, history=history, bias=bias, **settings))
    for name, values in together.items():
        assert np.array_equal(values, one_thread[name]), name
    for r in range(rows):
        own = {name: values[r] for name, values in settings.items()}
        alone = run_with(
            f"{level}:2", arguments(logits[r : r + 1], history=[history[r]], bias=[bias[r]], **own)
        )
        for name, values in together.items():
            assert np.array_equal(values[r], alone[name][0]), f"{name} of row {r}"


def expected_distribution(
    logits: Array, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Array:
    """Probabilities after the filters, written down independently of the reference."""
    p = np.exp(np.float64(logits) / temperature)
    p /= p.sum()
    p[p < min_p * p.max()] = 0
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    total = 0.0
    for i in order:
        if total >= top_p:
            p[i] = 0
        total += p[i]
    return p / p.sum()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
    ],
    ids=str,
)
def test_samples_follow_the_distribution(run: Run, settings: dict[str, Any]) -> None:
    """Chi-square against the expected counts; fixed seeds, so that it passes always or never."""
    logits = np.random.default_rng(3).normal(0, 1.5, 20).astype(np.float32)
    draws = 3000
    seeds = np.full(draws, 12345)
    sampled = run(np.tile(logits, (draws, 1)), seeds=seeds, counters=np.arange(draws), **settings)["sampled"]
    p = expected_distribution(logits, **settings)
    counts = np.bincount(sampled, minlength=20)
    assert counts[p == 0].sum() == 0
    expected = draws * p[p > 0]
    chi2 = float((np.square(counts[p > 0] - expected) / expected).sum())
    freedom = max(np.count_nonzero(p) - 1, 1)
    assert chi2 < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_seed_and_counter_decide(run: Run) -> None:
    logits = np.zeros((4, 1000))
    first = run(logits, seeds=[1, 1, 2, 1], counters=[0, 0, 0, 1])["sampled"]
    assert first[0] == first[1]
    assert len({int(first[1]), int(first[2]), int(first[3])}) == 3


def test_greedy_takes_the_lowest_of_the_largest(run: Run) -> None:
    logits = np.zeros((3, 200), np.float32)
    logits[0, [7, 150]] = 5
    logits[1] = -3
    logits[2, [199, 64]] = 1e-3
    assert run(logits, temperature=0)["sampled"].tolist() == [7, 0, 64]
    assert run(logits, temperature=0.99e-5)["sampled"].tolist() == [7, 0, 64]


def test_top_k_takes_the_lower_of_equal_ids(run: Run) -> None:
    logits = np.zeros((500, 100), np.float32)
    logits[:, 90] = 1
    sampled = run(logits, top_k=3, counters=np.arange(500))["sampled"]
    assert set(sampled.tolist()) == {0, 1, 90}


def test_filters_at_their_ends(run: Run) -> None:
    logits = np.tile(np.linspace(0, 3, 300, dtype=np.float32), (200, 1))
    counters = np.arange(200)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert set(run(logits, counters=counters, **one)["sampled"].tolist()) == {299}, one
    plain = run(logits, counters=counters)["sampled"]
    for off in ({"top_k": 300}, {"top_k": 1 << 30}, {"min_p": 1e-9}, {"top_k": 1 << 30, "min_p": 1e-9}):
        assert np.array_equal(run(logits, counters=counters, **off)["sampled"], plain), off
    equal = run(np.zeros((100, 64)), min_p=1.0, counters=np.arange(100))["sampled"]
    assert len(set(equal.tolist())) > 30


def test_masks(run: Run) -> None:
    logits = np.tile(np.arange(100, dtype=np.float32), (4, 1))
    allowed = [[5], [31, 32, 64], [], list(range(100))]
    for temperature in (0.0, 1.0):
        sampled = run(logits, allowed=allowed, temperature=temperature)["sampled"]
        assert sampled[0] == 5
        assert sampled[1] in ([64] if temperature == 0 else [31, 32, 64])
        assert sampled[2] == -1
        assert sampled[3] >= 0
    assert (run(logits, decodable=10, counters=np.arange(4))["sampled"] < 10).all()
    assert (run(logits, decodable=10, temperature=0)["sampled"] == 9).all()


def test_bias(run: Run) -> None:
    logits = np.tile(np.linspace(0, 5, 80, dtype=np.float32), (4, 1))
    bias = [{3: 100.0}, {79: -100.0}, {79: -np.inf, 78: -np.inf}, {200: 9.0, 79: -np.inf}]
    assert run(logits, bias=bias, temperature=0)["sampled"].tolist() == [3, 78, 77, 78]
    assert run(logits, bias=bias, temperature=1, top_k=1)["sampled"].tolist() == [3, 78, 77, 78]


def test_penalties(run: Run) -> None:
    """Ids 10, 11 and 12 are almost equal; what happened to them decides."""
    base = np.full(40, -9.0, np.float32)
    base[[10, 11, 12]] = (4.0, 3.9, 3.8)

    def greedy(history: list[int], prompt: int, **penalties: float) -> int:
        result = run(base, history=[history], prompt_lens=prompt, temperature=0, **penalties)
        return int(result["sampled"][0])

    assert greedy([10, 11], 2, presence=2.0, frequency=2.0) == 10  # the prompt is not counted
    assert greedy([10, 11], 0, presence=2.0) == 12
    assert greedy([10, 10, 10, 10, 11], 0, frequency=0.06) == 11
    assert greedy([10, 10, 10, 11, 12, 12], 0, frequency=0.3) == 11
    assert greedy([10], 1, repetition=1.5) == 11  # the prompt is counted
    assert greedy([10, 11, 12, 39], 4, repetition=1.5) == 10
    assert greedy([500, -1, 12], 0, presence=-1.0) == 12  # unknown ids have no effect
    negative = -np.ones(4, np.float32)
    assert run(negative, history=[[0]], repetition=2.0, temperature=0)["sampled"][0] == 1
    assert run(negative, history=[[0]], repetition=0.5, temperature=0)["sampled"][0] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_fail_alone(run: Run, temperature: float) -> None:
    logits = np.zeros((6, 70), np.float32)
    logits[0, 69], logits[1, 0], logits[2, 33] = np.nan, np.inf, np.nan
    logits[3] = -np.inf
    logits[4, 1:] = -np.inf
    result = run(logits, temperature=temperature, num_logprobs=2)
    assert result["sampled"][:5].tolist() == [-1, -1, -1, -1, 0]
    assert result["sampled"][5] >= 0
    assert result["ranks"][:4].tolist() == [7] * 4  # left alone
    assert np.isfinite(result["logprobs"][4:]).all()


def test_logprobs_are_of_the_raw_logits(run: Run) -> None:
    logits = np.round(np.random.default_rng(5).normal(0, 3, 600), 1).astype(np.float32)
    exact = np.float64(logits) - np.log(np.exp(np.float64(logits)).sum())
    order = sorted(range(600), key=lambda i: (-logits[i], i))
    unlikely = order[-1]
    result = run(
        np.tile(logits, (3, 1)),
        bias=[{unlikely: 1000.0}, {}, {}],
        temperature=0,
        repetition=1.3,
        history=[[1, 2, 3]] * 3,
        num_logprobs=[5, 0, -1],
    )
    assert result["sampled"][0] == unlikely
    assert result["logprobs"][0] == pytest.approx(exact[unlikely], rel=1e-6)
    assert result["ranks"][0] == 600
    assert result["top_ids"][0].tolist() == [*order[:5], 7, 7, 7]
    assert result["top_logprobs"][0, :5] == pytest.approx(exact[order[:5]], rel=1e-6)
    assert result["ranks"][1] == order.index(result["sampled"][1]) + 1
    assert result["top_ids"][1].tolist() == [7] * MAX_TOP
    assert result["ranks"][2] == 7


@pytest.mark.parametrize("level", LEVELS)
def test_token_logprobs_of_a_batch_and_alone(level: str) -> None:
    rng = np.random.default_rng(9)
    logits = rng.normal(0, 5, (6, 3001)).astype(np.float32)
    targets = rng.integers(0, 3001, 6).astype(np.int32)
    facts = SamplingFacts(3001, 3001, MAX_TOP)

    def score(rows: slice, threads: int) -> dict[str, Array]:
        device = device_of(level, threads)
        count = len(logits[rows])
        outputs = {
            "logprobs": np.zeros(count, np.float32),
            "ranks": np.zeros(count, np.int32),
            "top_ids": np.zeros((count, MAX_TOP), np.int32),
            "top_logprobs": np.zeros((count, MAX_TOP), np.float32),
        }
        given = {"logits": logits[rows].copy(), "targets": targets[rows].copy(), **outputs}
        tensors = {name: device.from_numpy(array) for name, array in given.items()}
        bind(token_logprobs, facts, device)(num_logprobs=MAX_TOP, **tensors)
        device.stream.synchronize()
        return outputs

    together = score(slice(0, 6), 2)
    for r in range(6):
        for name, values in score(slice(r, r + 1), 1).items():
            assert np.array_equal(values[0], together[name][r]), name
