"""The offline API: over the simulated worker, and over real checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pegainfer
from pegainfer import LLM, ConfigError, EngineDeadError, RequestError, SamplingParams
from tests.toy_tokenizer import write_toy

GOLDEN = Path("tests/golden/llama_smol")


@pytest.fixture
def sim(tmp_path: Path) -> Any:
    """A simulated LLM with the toy tokenizer."""
    write_toy(tmp_path)
    pace = {"sim_ttft_ms": 0.0, "sim_tpot_ms": 0.0}
    with LLM("simulated", tokenizer=str(tmp_path), simulate=True, max_model_len=256, **pace) as llm:
        yield llm


@pytest.fixture(scope="module")
def golden() -> Any:
    """A tiny trained-shape model without a tokenizer."""
    with LLM(str(GOLDEN), skip_tokenizer_init=True, dtype="float32", num_threads=1) as llm:
        yield llm


def spell(text: str, **params: Any) -> SamplingParams:
    """Parameters under which the simulator writes `text` over and over."""
    return SamplingParams(allowed_token_ids=tuple(text.encode()), **params)


def test_outputs_come_in_the_order_of_prompts(sim: LLM) -> None:
    params = [spell("abc", max_tokens=7), spell("x", max_tokens=2)]
    first, second = sim.generate(["hello", {"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
    assert (first.prompt, first.finished) == ("hello", True)
    assert (second.prompt, second.prompt_token_ids) == (None, [1, 2])
    assert [output.outputs[0].text for output in (first, second)] == ["abcabca", "xx"]
    assert first.outputs[0].finish_reason == "length"
    assert first.outputs[0].token_ids == list(b"abcabca")
    assert first.metrics is not None
    assert first.metrics.decode_s >= 0.0


def test_one_prompt_in_every_form(sim: LLM) -> None:
    ids = sim.get_tokenizer().encode("hello")
    for prompt in ("hello", {"prompt": "hello"}, ids, {"prompt_token_ids": ids}, ["hello"], [ids]):
        (output,) = sim.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)  # type: ignore[arg-type]
        assert output.prompt_token_ids == ids


def test_stop_strings_end_the_request_in_the_engine(sim: LLM) -> None:
    (output,) = sim.generate("hi", spell("abcd", stop=["bc"], max_tokens=200), use_tqdm=False)
    answer = output.outputs[0]
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "bc")
    assert answer.token_ids == list(b"abc")
    while sim._core.has_work:
        sim._core.step()
    assert sim._core.stats().generation_tokens < 10


def test_t7_choices_of_one_prompt(sim: LLM) -> None:
    (output,) = sim.generate(
        [[1, 2, 3, 4, 5]], SamplingParams(n=3, max_tokens=4, ignore_eos=True, temperature=0.5), use_tqdm=False
    )
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert sum(len(choice.token_ids) for choice in output.outputs) == 12


def test_logprobs_have_the_shape_of_vllm(sim: LLM) -> None:
    (output,) = sim.generate(
        [[65, 66, 67]], spell("x", max_tokens=2, logprobs=2, prompt_logprobs=0), use_tqdm=False
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(entry or ()) for entry in output.prompt_logprobs[1:]] == [[66], [67]]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert answer.logprobs[0][ord("x")].decoded_token == "x"
    assert [entry.rank for entry in answer.logprobs[0].values()] == [1, 2]
    assert answer.cumulative_logprob == pytest.approx(2 * -0.6931)


def test_chat_uses_the_template(sim: LLM) -> None:
    (output,) = sim.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    two = sim.chat([[{"role": "user", "content": "hi"}]] * 2, SamplingParams(max_tokens=1), use_tqdm=False)
    assert [each.prompt for each in two] == [output.prompt] * 2


def test_a_wrong_prompt_stops_the_call_before_anything_runs(sim: LLM) -> None:
    with pytest.raises(RequestError, match="maximum context length is 256 tokens"):
        sim.generate(["fine", [1] * 300], SamplingParams(max_tokens=1), use_tqdm=False)
    assert sim._core.stats().prompt_tokens == 0
    with pytest.raises(RequestError, match="do not match"):
        sim.generate(["a", "b"], [SamplingParams()], use_tqdm=False)


def test_streaming_and_leaving_early(sim: LLM) -> None:
    assert "".join(delta.text for delta in sim.stream("hi", spell("abc", max_tokens=5))) == "abcab"
    pieces = sim.stream("hi", spell("abc", max_tokens=200))
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert sim.generate("hi", spell("y", max_tokens=2), use_tqdm=False)[0].outputs[0].text == "yy"
    assert sim._core.stats().num_running == 0


def test_ctrl_c_stops_the_call_and_not_the_engine(tmp_path: Path) -> None:
    with LLM(str(tmp_path), simulate=True, skip_tokenizer_init=True, sim_tpot_ms=30.0) as llm:
        for delay in (0.1, 0.115, 0.13):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                llm.generate([[1]], SamplingParams(max_tokens=100), use_tqdm=False)
            timer.join()
        (output,) = llm.generate([[1]], SamplingParams(max_tokens=3), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3
        assert llm._core.stats().num_running == 0


def test_the_progress_bar_says_what_people_know(sim: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    sim.generate(["a", "b"], SamplingParams(max_tokens=3))
    shown = capfd.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "est. speed input:" in shown
    assert "output:" in shown


def test_defaults_come_from_the_model(tmp_path: Path) -> None:
    config = {"temperature": 0.25, "top_k": 3, "max_new_tokens": 5, "do_sample": True}
    (tmp_path / "model").mkdir()
    for file in GOLDEN.iterdir():
        (tmp_path / "model" / file.name).symlink_to(file.resolve())
    options: dict[str, Any] = {"skip_tokenizer_init": True, "override_generation_config": config}
    with LLM(str(tmp_path / "model"), **options) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 3, 5)
        assert len(llm.generate([[1, 2]], use_tqdm=False)[0].outputs[0].token_ids) <= 5
    options["override_generation_config"] = {"top_p": 7}
    with pytest.raises(ConfigError, match="top_p"):
        LLM(str(tmp_path / "model"), **options)


def test_golden_logits_end_to_end(golden: LLM) -> None:
    expected = np.load(GOLDEN / "golden.npz")
    logits = expected["logits_f32"].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5, prompt_logprobs=0)
    rows = expected["input_ids"].tolist()
    for row, own, output in zip(rows, logprobs, golden.generate(rows, params, use_tqdm=False), strict=True):
        answer = output.outputs[0]
        assert answer.token_ids == [int(own[-1].argmax())]
        assert answer.logprobs is not None
        assert output.prompt_logprobs is not None
        top = list(answer.logprobs[0])[:5]
        assert top == np.argsort(-own[-1])[:5].tolist()
        for position, entry in enumerate(output.prompt_logprobs[1:]):
            assert entry is not None
            token_id = row[position + 1]
            assert entry[token_id].logprob == pytest.approx(own[position, token_id], abs=2e-3)


def test_greedy_is_the_same_alone_and_in_company(golden: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [[(7 * i + j) % 200 + 1 for j in range(5 + 3 * i)] for i in range(12)]
    together = golden.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, together, strict=True):
        golden.reset_prefix_cache()
        (alone,) = golden.generate([prompt], params, use_tqdm=False)
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids


def test_text_needs_a_tokenizer(golden: LLM) -> None:
    with pytest.raises(ConfigError, match="skip_tokenizer_init"):
        golden.generate("text", use_tqdm=False)
    with pytest.raises(RequestError, match="stop_token_ids"):
        golden.generate([[1]], SamplingParams(stop="x"), use_tqdm=False)


def test_a_closed_llm_says_so(tmp_path: Path) -> None:
    llm = LLM(str(tmp_path), simulate=True, skip_tokenizer_init=True)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError):
        llm.generate([[1]], use_tqdm=False)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="max_modle_len"):
        LLM("smollm2", max_modle_len=5)


def test_importing_the_package_is_light() -> None:
    heavy = ("numpy", "msgspec", "zmq", "tokenizers")
    code = f"import sys, pegainfer; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_every_public_name_is_there() -> None:
    for name in pegainfer.__all__:
        assert getattr(pegainfer, name) is not None
    with pytest.raises(AttributeError):
        _ = pegainfer.nothing
