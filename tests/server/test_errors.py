"""Bad requests: the status, the envelope and the field at fault; and the next request is served."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import VOCAB_SIZE
from tests.server.servers import Server, serving, until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
BIG = 2**63 - 1

BAD: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": 5}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", 5]}, "prompt"),
    (COMPLETIONS, {"prompt": [VOCAB_SIZE]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [BIG]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "ten"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids"),
    (COMPLETIONS, {"prompt": "a", "presence_penalty": 2.1}, "presence_penalty"),
    (COMPLETIONS, {"prompt": "a", "frequency_penalty": -2.1}, "frequency_penalty"),
    (COMPLETIONS, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "a", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "a", "min_p": 1.5}, "min_p"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "temperature": 2.5}, "temperature"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, "stop"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "temperature": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "logprobs": -2}, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "stream": "yes"}, "stream"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "a", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(a"}}, "structured_outputs"),
    (COMPLETIONS, {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    (COMPLETIONS, {"prompt": [1] * 3000}, "input_tokens"),
    (COMPLETIONS, {"prompt": [1] * 30, "max_tokens": 2040}, "input_tokens"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    (CHAT, {"messages": USER, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "tools": []}, "tools"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "auto"}, "tool_choice"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": USER, "continue_final_message": True}, "continue_final_message"),
    ("/tokenize", {}, "prompt"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": [VOCAB_SIZE + 10]}, "tokens"),
]


@pytest.mark.parametrize(("path", "fields", "param"), BAD, ids=[f"{p} {f}"[:60] for p, f, _ in BAD])
def test_t14_t16_a_bad_field_is_named(
    tiny: Server, path: str, fields: dict[str, Any], param: str | None
) -> None:
    status, answer = tiny.post(path, **fields)
    assert status == 400, answer
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    assert error["param"] == param, error
    assert error["message"]
    assert "choices" in tiny.complete(prompt=[1], max_tokens=1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "a", "temperature": Infinity}',
        b"[" * 5000,
    ],
)
def test_bodies_that_are_no_request(tiny: Server, body: bytes) -> None:
    status, answer = tiny.call("POST", COMPLETIONS, body)
    assert (status, answer["error"]["code"]) == (400, 400)
    assert tiny.complete(prompt=[1], max_tokens=1)


def test_what_is_not_there(tiny: Server) -> None:
    status, answer = tiny.post(COMPLETIONS, model="nope", prompt="a")
    assert (status, answer["error"]["param"]) == (404, "model")
    assert answer["error"]["message"] == "The model `nope` does not exist."
    with pytest.raises(openai.NotFoundError):
        tiny.client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "a"}])
    for method, path, code, kind in (
        ("GET", "/nope", 404, "NotFoundError"),
        ("GET", COMPLETIONS, 405, "MethodNotAllowedError"),
        ("POST", "/v1/embeddings", 501, "NotImplementedError"),
        ("GET", "/v1/models/nope", 404, "NotFoundError"),
    ):
        status, answer = tiny.call(method, path, b"{}" if method == "POST" else None)
        assert (status, answer["error"]["type"]) == (code, kind)


def test_a_body_too_large(tiny: Server) -> None:
    status, answer = tiny.post(COMPLETIONS, prompt="a" * (1 << 20))
    assert (status, answer["error"]["code"]) == (413, 413)

    def chunked() -> Any:
        for _ in range(17):  # the last one is too much: the server need not read what it has refused
            yield b"x" * (1 << 16)

    with contextlib.closing(tiny.connect()) as connection:
        headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
        connection.request("POST", COMPLETIONS, chunked(), headers, encode_chunked=True)
        assert connection.getresponse().status == 413
    assert tiny.complete(prompt=[1], max_tokens=1)


def test_the_client_sees_its_own_exceptions(tiny: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert caught.value.param == "temperature"


def test_numbers_that_json_cannot_say(tiny: Server) -> None:
    """A log-probability of minus infinity arrives as a number."""
    answer = tiny.complete(
        prompt=[1], max_tokens=1, temperature=0, logprobs=20, allowed_token_ids=[65], logit_bias={"65": 100}
    )
    top = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    assert all(math.isfinite(score) for score in top.values())


def test_t10_little_memory(tiny_model: Path, tmp_path: Path) -> None:
    """Four blocks: what can never fit is refused at once, what cannot fit together takes turns."""
    words = (str(tiny_model), "--load-format", "dummy", "--num-gpu-blocks-override", "5")
    with serving(tmp_path / "log", *words) as server:
        assert server.post(COMPLETIONS, prompt=[1] * 100)[0] == 400
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": 30, "return_token_ids": True}
        prompts = [[i] * 20 for i in (1, 2)]
        alone = [server.complete(prompt=p, **body)["choices"][0]["token_ids"] for p in prompts]
        both = server.complete(prompt=prompts, **body)["choices"]
        assert [choice["token_ids"] for choice in both] == alone
        assert server.metric("vllm:num_preemptions_total") >= 1
        assert until(server.is_idle)


def test_a_full_queue(tiny_model: Path, tmp_path: Path) -> None:
    words = (str(tiny_model), "--simulate", "--sim-tpot-ms", "50", "--max-num-seqs", "1")
    with serving(tmp_path / "log", *words, "--max-num-queued-reqs", "2") as server:
        status, answer = server.post(COMPLETIONS, prompt=[[1]] * 8, max_tokens=100, ignore_eos=True)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailable")
        assert until(server.is_idle)
        assert server.complete(prompt=[1], max_tokens=1)
