"""`/v1/chat/completions`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.servers import Server, serving
from tests.toy_tokenizer import write_toy

HELLO = [{"role": "user", "content": "hello"}]


def test_the_shape_of_a_stream(tiny: Server) -> None:
    chunks = tiny.chunks("/v1/chat/completions", messages=HELLO, max_tokens=5, ignore_eos=True)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_content_in_parts_and_the_older_limit(tiny: Server) -> None:
    answer = tiny.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        max_tokens=9,
        max_completion_tokens=4,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
    assert answer.choices[0].message.role == "assistant"


def test_chat_logprobs(tiny: Server) -> None:
    answer = tiny.client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    for entry in content:
        assert len(entry.top_logprobs) == 2
        assert entry.bytes is not None


def test_unknown_fields_change_nothing(tiny: Server) -> None:
    status, _ = tiny.post(
        "/v1/chat/completions", messages=HELLO, max_tokens=1, user="u", metadata={"a": 1}, store=False, foo=1
    )
    assert status == 200


def test_t9_without_a_limit_the_rest_of_the_context(tiny_model: Path, tmp_path: Path) -> None:
    with serving(
        tmp_path / "log", str(tiny_model), "--load-format", "dummy", "--max-model-len", "32"
    ) as server:
        count = server.post("/tokenize", messages=HELLO)[1]["count"]
        assert count < 32
        body = {"messages": HELLO, "ignore_eos": True}
        status, answer = server.post("/v1/chat/completions", **body)
        assert status == 200
        assert answer["usage"]["total_tokens"] == 32
        assert answer["choices"][0]["finish_reason"] == "length"
        for prompt, limit in (([1] * 33, 1), ([1] * 30, 10), ([1] * 32, None)):
            fields = {"prompt": prompt} | ({} if limit is None else {"max_tokens": limit})
            status, answer = server.post("/v1/completions", **fields)
            assert status == 400
            assert "maximum context length is 32 tokens" in answer["error"]["message"]
            assert answer["error"]["param"] == "input_tokens"
        assert server.complete(prompt=[1] * 30, max_tokens=2)


REFUSING = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (
            REFUSING,
            [{"role": "system", "content": "x"}],
            "System role not supported",
        ),
        ("{{ messages[0].content + 1 }}", [{"role": "assistant", "content": None}], ""),
        ("{{ messages[0].content.missing.name }}", HELLO, ""),
    ],
)
def test_t18_template_errors(
    tmp_path: Path, tiny_model: Path, template: str, messages: list[dict[str, str]], message: str
) -> None:
    write_toy(tmp_path, template=template)
    (tmp_path / "config.json").write_text((tiny_model / "config.json").read_text())
    with serving(tmp_path / "log", str(tmp_path), "--load-format", "dummy") as server:
        status, answer = server.post("/v1/chat/completions", messages=messages, max_tokens=1)
        assert status == 400
        assert message in answer["error"]["message"]
        assert answer["error"]["type"] == "BadRequestError"
        assert server.complete(prompt=[1], max_tokens=1)


def test_t22_user_text_stays_text(tiny: Server) -> None:
    user = [{"role": "user", "content": "<|im_end|>"}]
    tokens = tiny.post("/tokenize", messages=user, add_generation_prompt=False)[1]["tokens"]
    assert tokens.count(263) == 1  # the template's own end, not the user's
    assert bytes(t for t in tokens if t < 256).count(b"<|im_end|>") == 1


def test_t23_chat_ids_are_the_templates(tiny: Server) -> None:
    status, rendered = tiny.post("/tokenize", messages=HELLO)
    assert status == 200
    body = {"max_tokens": 1, "return_token_ids": True}
    answer = tiny.post("/v1/chat/completions", messages=HELLO, **body)[1]
    ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
    assert ids == rendered["tokens"]


def test_a_chat_ends_at_the_models_own_mark(tiny: Server) -> None:
    answer = tiny.post("/v1/chat/completions", messages=HELLO, logit_bias={"263": 100}, max_tokens=9)[1]
    choice = answer["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
