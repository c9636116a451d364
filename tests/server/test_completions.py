"""`/v1/completions` through the openai client and over plain HTTP."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import VOCAB_SIZE
from tests.server.servers import Server

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}


def ids_of(answer: dict[str, Any], index: int = 0) -> list[int]:
    """Generated token ids of a choice."""
    ids = answer["choices"][index]["token_ids"]
    assert isinstance(ids, list)
    return ids


def test_every_form_of_prompt(tiny: Server) -> None:
    client = tiny.client
    one: list[Any] = ["hello", [104, 101, 108, 108, 111], ["hello"], [[104, 101]]]
    for prompt in one:
        answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
        assert [choice.index for choice in answer.choices] == [0]
    many = client.completions.create(model="tiny", prompt=[[1, 2], [3], [4, 5, 6]], max_tokens=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.usage is not None
    assert many.usage.prompt_tokens == 6


def test_the_defaults_of_the_product(tiny: Server) -> None:
    """No model in the body, 128 tokens, greedy."""
    body = {"prompt": [5, 6, 7], "ignore_eos": True, "return_token_ids": True}
    first, second = tiny.complete(**body), tiny.complete(**body)
    assert len(ids_of(first)) == 128
    assert ids_of(first) == ids_of(second)
    assert first["object"] == "text_completion"
    assert first["id"].startswith("cmpl-")
    assert first["model"] == "tiny"
    assert first["choices"][0]["finish_reason"] == "length"


def test_models(tiny: Server) -> None:
    cards = list(tiny.client.models.list())
    assert [card.id for card in cards] == ["tiny", "alias"]
    status, card = tiny.call("GET", "/v1/models/alias")
    assert status == 200
    assert card["max_model_len"] == 2048
    assert card["root"]
    assert tiny.complete(model="alias", prompt=[1], max_tokens=1)["model"] == "alias"


@pytest.mark.parametrize("stream", [False, True])
def test_t7_usage(tiny: Server, stream: bool) -> None:
    def usage(**fields: Any) -> tuple[int, int, int]:
        fields |= {"max_tokens": 4, "ignore_eos": True}
        if stream:
            last = tiny.chunks(stream_options={"include_usage": True}, **fields)[-1]
            assert last["choices"] == []
            counts = last["usage"]
        else:
            counts = tiny.complete(**fields)["usage"]
        return counts["prompt_tokens"], counts["completion_tokens"], counts["total_tokens"]

    assert usage(prompt=[1, 2, 3, 4, 5], n=3, temperature=1) == (5, 12, 17)
    assert usage(prompt=[[1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]]) == (12, 8, 20)


def test_t8_stream_options(tiny: Server) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3}
    assert all(chunk["choices"] for chunk in tiny.chunks(**body, stream_options={}))
    assert not any("usage" in chunk for chunk in tiny.chunks(**body))
    counted = tiny.chunks(**body, stream_options={"include_usage": True})
    assert [bool(chunk["choices"]) for chunk in counted] == [True] * (len(counted) - 1) + [False]
    every = tiny.chunks(**body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert all("usage" in chunk for chunk in every)
    status, answer = tiny.post("/v1/completions", **body, stream_options={"include_usage": True})
    assert (status, answer["error"]["param"]) == (400, "stream_options")


def test_every_choice_of_a_stream_ends_once(tiny: Server) -> None:
    chunks = tiny.chunks(prompt=[[1], [2]], n=2, temperature=1, max_tokens=6, ignore_eos=True)
    for index in range(4):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in own]
        assert reasons == [None] * (len(own) - 1) + ["length"]
        assert all("logprobs" in choice for choice in own)


def test_the_openai_client_streams(tiny: Server) -> None:
    stream = tiny.client.completions.create(
        model="tiny", prompt="hello", max_tokens=5, stream=True, extra_body={"ignore_eos": True}
    )
    reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] == "length"
    assert not any(reasons[:-1])


def test_t11_prefix_cache(tiny: Server) -> None:
    def cached(prompt: list[int], **fields: Any) -> int:
        answer = tiny.complete(prompt=prompt, max_tokens=4, **GREEDY, **fields)
        texts.append(answer["choices"][0]["token_ids"])
        count = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert isinstance(count, int)
        return count

    texts: list[list[int]] = []
    prompt = [200 - i for i in range(33)]
    salt = {"cache_salt": "t11"}
    assert cached(prompt[:32], **salt) == 0
    assert cached(prompt[:32], **salt) == 16
    assert texts[0] == texts[1]
    assert cached(prompt, **salt) == 32
    assert cached([*prompt[:2], 9, *prompt[3:]], **salt) == 0
    assert cached(prompt, cache_salt="other") == 0
    assert cached(prompt, prompt_logprobs=0, **salt) == 0


def test_t15_nothing_changes_greedy_output(tiny: Server) -> None:
    """Alone, among 43 others, and after a cache hit."""
    prompt = [(7 * i) % 251 for i in range(70)]
    body = {"max_tokens": 64, **GREEDY}
    alone = ids_of(tiny.complete(prompt=prompt, cache_salt="a", **body))
    mates = [[(i * j + 3) % 256 for j in range(1, 20 + i)] for i in range(43)]
    with ThreadPoolExecutor(44) as pool:
        others = [pool.submit(tiny.complete, prompt=mate, **body) for mate in mates]
        crowded = pool.submit(tiny.complete, prompt=prompt, cache_salt="b", **body).result()
        assert all(len(ids_of(other.result())) == 64 for other in others)
    again = tiny.complete(prompt=prompt, cache_salt="b", **body)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    assert alone == ids_of(crowded) == ids_of(again)


def test_t15_a_seed_decides_whatever_the_company(tiny: Server) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 32, "temperature": 0.8, "ignore_eos": True}
    body["return_token_ids"] = True
    seen = set()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            mates = [pool.submit(tiny.complete, **body) for _ in range(7)]
            seen.add(tuple(ids_of(tiny.complete(seed=42, **body))))
            free = {tuple(ids_of(mate.result())) for mate in mates}
            assert len(free) > 1
    assert len(seen) == 1


def test_t16_bias_and_min_tokens(tiny: Server) -> None:
    body = {"prompt": [10, 11, 12], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
    assert ids_of(tiny.complete(**body, logit_bias={"65": 100})) == [65, 65, 65]
    greedy = ids_of(tiny.complete(**body))[0]
    assert greedy not in ids_of(tiny.complete(**body, logit_bias={str(greedy): -100}))
    eos = VOCAB_SIZE - 1
    answer = tiny.complete(**body | {"max_tokens": 20}, min_tokens=5, logit_bias={str(eos): 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert len(ids_of(answer)) >= 5
    assert answer["choices"][0]["stop_reason"] is None


def test_stops(tiny: Server) -> None:
    base = {"prompt": [3], "max_tokens": 6, "temperature": 0, "logit_bias": {"65": 100}}
    assert tiny.complete(**base)["choices"][0]["text"] == "AAAAAA"
    cut = tiny.complete(**base, stop="AAA")["choices"][0]
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == ("", "stop", "AAA")
    kept = tiny.complete(**base, stop=["AAA"], include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == "AAA"
    by_id = tiny.complete(**base, stop_token_ids=[65])["choices"][0]
    assert (by_id["finish_reason"], by_id["stop_reason"]) == ("stop", 65)


def test_logprobs(tiny: Server) -> None:
    answer = tiny.client.completions.create(
        model="tiny", prompt=[1, 2, 3], max_tokens=3, logprobs=2, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert len(logprobs.token_logprobs) == 3
    for score, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert score == max(top.values())
        assert score <= 0


def test_tokenize_and_back(tiny: Server) -> None:
    status, answer = tiny.post("/tokenize", prompt="hello w👋", return_token_strs=True)
    assert status == 200
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 2048
    assert tiny.post("/detokenize", tokens=answer["tokens"]) == (200, {"prompt": "hello w👋"})
