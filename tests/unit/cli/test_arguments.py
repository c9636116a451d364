"""Flags: generated from the configuration, in every spelling; wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from pegainfer.cli.arguments import ArgumentParser, engine_config, server_options
from pegainfer.config import EngineConfig, ServerOptions
from pegainfer.errors import ConfigError


def parser() -> ArgumentParser:
    parser = ArgumentParser("serve", "Serve.", examples=("pegainfer serve x",))
    parser.add_model()
    parser.add_engine_options()
    parser.add_options(ServerOptions, "Server")
    return parser


def parsed(*words: str) -> tuple[EngineConfig, ServerOptions]:
    namespace = parser().parse(words)
    return engine_config(namespace), server_options(namespace)


def test_nothing_given_is_the_default() -> None:
    assert parsed() == (EngineConfig(), ServerOptions())


def test_every_option_has_a_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parser().parse(["--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    config = EngineConfig()
    parts = (getattr(config, field.name) for field in dataclasses.fields(config))
    for part in (*filter(dataclasses.is_dataclass, parts), config, ServerOptions()):
        for field in dataclasses.fields(part):
            if "help" in field.metadata:
                assert f"--{field.name.replace('_', '-')}" in printed
    assert printed.endswith("examples:\n  pegainfer serve x\n")
    assert "usage: pegainfer serve [MODEL] [flags]" in printed


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["m"], "model.model", "m"),
        (["--model", "m"], "model.model", "m"),
        (["m", "--model", "m"], "model.model", "m"),
        (["--seed", "3", "m", "--port", "1"], "model.model", "m"),
        (["--max-model-len", "8k"], "model.max_model_len", 8000),
        (["--max_model_len=8K"], "model.max_model_len", 8192),
        (["--max-model-len", "auto"], "model.max_model_len", -1),
        (["--max-model-len", "-1"], "model.max_model_len", -1),
        (["--served-model-name", "a", "b"], "model.served_model_name", ("a", "b")),
        (["--served-model-name", '["a", "b"]'], "model.served_model_name", ("a", "b")),
        (["--skip-tokenizer-init"], "model.skip_tokenizer_init", True),
        (["--no-enable-prefix-caching"], "cache.enable_prefix_caching", False),
        (["--no_enable_prefix_caching"], "cache.enable_prefix_caching", False),
        (["--enable-chunked-prefill"], "scheduler.enable_chunked_prefill", True),
        (["--gpu-memory-utilization", "0.5"], "cache.gpu_memory_utilization", 0.5),
        (["--kv-cache-memory-bytes", "2GiB"], "cache.kv_cache_memory_bytes", 2 << 30),
        (["--hf-overrides", '{"a": [1]}'], "model.hf_overrides", {"a": [1]}),
        (["--load-format", "dummy"], "load.load_format", "dummy"),
        (["--device", "cpu"], "device", "cpu"),
        (["--num-threads", "3"], "num_threads", 3),
        (["--enforce-eager"], "enforce_eager", True),
        (["--chat-template", "a_b --c_d"], "model.chat_template", "a_b --c_d"),
    ],
)
def test_engine_flags(words: list[str], path: str, value: object) -> None:
    found: Any = parsed(*words)[0]
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value


def test_server_flags() -> None:
    words = [
        "--port",
        "9",
        "--api-key",
        "a",
        "b",
        "--allowed-origins",
        '["*"]',
        "--max-request-bytes",
        "1MiB",
    ]
    options = parsed(*words, "--disable-log-stats")[1]
    assert (options.port, options.api_key, options.allowed_origins) == (9, ("a", "b"), ("*",))
    assert (options.max_request_bytes, options.disable_log_stats) == (1 << 20, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--max-modle-len", "3"], "unknown flag --max-modle-len; did you mean --max-model-len?"),
        (["--max-model", "3"], "unknown flag --max-model;"),
        (["m", "n"], "unexpected argument 'n'"),
        (["m", "--model", "n"], "the model is given twice: m and --model n"),
        (["--port", "x"], "--port: invalid int value: 'x'"),
        (["--port"], "--port: expected one argument"),
        (["--max-model-len", "many"], "--max-model-len: 'many' is not a size"),
        (["--dtype", "int3"], "--dtype: invalid choice: 'int3'"),
        (["--hf-overrides", "{"], "--hf-overrides: '{' is not JSON"),
        (["--hf-overrides", "[1]"], "--hf-overrides: '[1]' is not a JSON object"),
        (["--served-model-name", "[1"], "--served-model-name: '[1' is not a JSON list"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be at least 1"),
        (["--help=nosuchthing"], "no flag of pegainfer serve mentions 'nosuchthing'"),
    ],
)
def test_wrong_flags_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parsed(*words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel-size", "2"],
        ["--tensor_parallel_size=2"],
        ["-tp", "2"],
        ["--quantization", "awq"],
        ["--kv-cache-dtype", "fp8"],
        ["--enable-lora"],
        ["--lora-modules", "a=b", "c=d"],
        ["--enable-auto-tool-choice"],
        ["--tool-call-parser", "hermes"],
        ["--speculative-config", '{"method": "ngram"}'],
        ["--otlp-traces-endpoint", "http://x"],
    ],
)
def test_what_is_not_built_is_refused_by_name(words: list[str]) -> None:
    with pytest.raises(
        ConfigError, match=rf"^{words[0].partition('=')[0].replace('_', '-')} .*not supported: "
    ):
        parsed("m", *words)


@pytest.mark.parametrize(
    "words",
    [
        ["--tensor-parallel-size", "1"],
        ["-tp", "1", "-pp", "1"],
        ["--kv-cache-dtype=auto"],
        ["--trust-remote-code"],
        ["--no-trust-remote-code"],
        ["--disable-log-requests"],
        ["--swap-space", "4"],
        ["--compilation-config", '{"level": 3}'],
        ["--logprobs-mode", "raw_logprobs"],
        ["--allowed-methods", "GET", "POST"],
    ],
)
def test_what_asks_for_nothing_is_taken(words: list[str]) -> None:
    assert parsed(*words, "--port", "9", "m")[0].model.model == "m"


def test_a_flag_without_effect_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    parsed("--trust-remote-code", "--tensor-parallel-size", "1")
    assert capsys.readouterr().err == (
        "pegainfer: note: --trust-remote-code has no effect: code from checkpoints is never run\n"
    )


def test_help_about_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("max-model-len", "max_model_len", "--max-model-len"):
        with pytest.raises(SystemExit):
            parser().parse([f"--help={word}"])
        printed = capsys.readouterr().out
        assert "--max-model-len" in printed
        assert "--port" not in printed
    with pytest.raises(SystemExit):
        parser().parse(["--help=kv cache"])
    assert "--block-size" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["toml", "json"])
def test_a_file_gives_values_that_flags_override(tmp_path: Path, kind: str) -> None:
    values = {
        "model": "m",
        "max-model-len": "8k",
        "served_model_name": ["a", "b"],
        "enable-prefix-caching": False,
        "hf-overrides": {"x": {"y": 1}},
        "port": 7,
        "tensor-parallel-size": 1,
        "trust-remote-code": False,
    }
    file = tmp_path / f"config.{kind}"
    if kind == "json":
        file.write_text(json.dumps(values))
    else:
        lines = [f'"{key}" = {json.dumps(value)}' for key, value in values.items() if key != "hf-overrides"]
        file.write_text("\n".join([*lines, "[hf-overrides.x]", "y = 1"]))
    config, server = parsed("--config", str(file), "--port", "8", "--served-model-name", "c")
    assert config.model.model == "m"
    assert config.model.max_model_len == 8000
    assert config.model.served_model_name == ("c",)
    assert config.model.hf_overrides == {"x": {"y": 1}}
    assert not config.cache.enable_prefix_caching
    assert server.port == 8


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "port: 3", "write it as TOML or JSON"),
        ("c.toml", "port = ", "Invalid value"),
        ("c.json", "[1]", "expected an object"),
        ("c.json", '{"prot": 3}', "unknown flag --prot; did you mean --port?"),
        ("c.json", '{"tensor-parallel-size": 8}', "--tensor-parallel-size 8 is not supported"),
    ],
)
def test_wrong_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        parsed("--config", str(file))
    assert message in str(error.value)
    assert str(file) in str(error.value)


VLLM_FLAGS = """
--model --host --port --uds --served-model-name --tokenizer --dtype --max-model-len
--gpu-memory-utilization --kv-cache-memory-bytes --num-gpu-blocks-override --block-size
--max-num-seqs --max-num-batched-tokens --enable-chunked-prefill --no-enable-chunked-prefill
--enable-prefix-caching --no-enable-prefix-caching --tensor-parallel-size -tp
--pipeline-parallel-size -pp --data-parallel-size -dp --quantization -q --kv-cache-dtype
--load-format --download-dir --revision --hf-token --trust-remote-code --seed --enforce-eager
--scheduling-policy --max-logprobs --logprobs-mode --generation-config --override-generation-config
--chat-template --chat-template-content-format --default-chat-template-kwargs
--enable-auto-tool-choice --tool-call-parser --reasoning-parser --enable-lora --lora-modules
--max-loras --max-lora-rank --speculative-config --api-key --ssl-keyfile --ssl-certfile
--ssl-ca-certs --allowed-origins --allowed-methods --allowed-headers --enable-request-id-headers
--enable-prompt-tokens-details --enable-force-include-usage --disable-log-stats
--enable-log-requests --disable-log-requests --max-log-len --uvicorn-log-level
--disable-uvicorn-access-log --otlp-traces-endpoint --shutdown-timeout --stream-interval
--max-num-queued-reqs --config --disable-fastapi-docs --device --root-path --middleware --swap-space
--cpu-offload-gb --skip-tokenizer-init --hf-overrides
"""


@pytest.mark.parametrize("flag", VLLM_FLAGS.split())
def test_flags_that_people_type_from_habit_are_known(flag: str) -> None:
    with pytest.raises((ConfigError, SystemExit)) as error:
        parsed(flag, "--no-such-flag-either")
    assert f"unknown flag {flag}" not in str(error.value)
