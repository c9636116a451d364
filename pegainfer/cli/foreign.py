"""Flags that people know from vLLM and that name what this engine does not do, or always does.

A value that asks for nothing (`--tensor-parallel-size 1`) is dropped, a flag without consequence is dropped
with a note, and everything else is refused by name: a flag that is silently ignored gives wrong results.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass

from pegainfer.errors import ConfigError

__all__ = ["drop_foreign"]


@dataclass(frozen=True, slots=True)
class _Foreign:
    """`arity`: the most values that follow. `harmless` lists values that ask for nothing. `note`
    explains why the flag can be dropped, `refusal` why it cannot.
    """

    arity: int
    refusal: str = ""
    note: str = ""
    harmless: tuple[str, ...] = ()


_MANY = 1000
_ONE_RANK = "this version runs on one device"
_NO_QUANTIZATION = (
    "weights keep the number format of their files; pass a quantised checkpoint or GGUF file instead"
)
_NO_LORA = "LoRA adapters are not implemented"
_NO_TOOLS = "tool calls are not parsed by this version"
_NO_SPECULATION = "speculative decoding is not implemented"
_NO_KV_TIERS = "the KV cache lives on the device only"
_NO_MULTIMODAL = "only text models are served"
_NO_PASSES = "there is no graph compiler"

_FLAGS = {
    # Parallelism
    "--tensor-parallel-size": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "-tp": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "--pipeline-parallel-size": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "-pp": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "--data-parallel-size": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "-dp": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "--decode-context-parallel-size": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "--enable-expert-parallel": _Foreign(0, _ONE_RANK),
    "--distributed-executor-backend": _Foreign(1, _ONE_RANK, harmless=("mp", "uni")),
    "--nnodes": _Foreign(1, _ONE_RANK, harmless=("1",)),
    "--api-server-count": _Foreign(1, "there is one API server process", harmless=("1",)),
    "--disable-custom-all-reduce": _Foreign(0, note="there is nothing to reduce on one device"),
    # Weights
    "--quantization": _Foreign(1, _NO_QUANTIZATION, harmless=("none", "gguf")),
    "-q": _Foreign(1, _NO_QUANTIZATION, harmless=("none", "gguf")),
    "--trust-remote-code": _Foreign(0, note="code from checkpoints is never run"),
    "--config-format": _Foreign(1, "only Hugging Face configs are read", harmless=("auto", "hf")),
    "--tokenizer-mode": _Foreign(1, "there is one tokenizer implementation", harmless=("auto", "hf", "slow")),
    "--tokenizer-revision": _Foreign(
        1, "the tokenizer has the model's revision; pass a directory to --tokenizer"
    ),
    "--code-revision": _Foreign(1, note="code from checkpoints is never run"),
    "--cpu-offload-gb": _Foreign(1, "weights are not offloaded", harmless=("0", "0.0")),
    "--use-tqdm-on-load": _Foreign(0, note="progress is always shown"),
    # KV cache and scheduler
    "--kv-cache-dtype": _Foreign(1, "the KV cache has the type of the model", harmless=("auto",)),
    "--swap-space": _Foreign(1, note="preempted requests are recomputed, never swapped"),
    "--kv-offloading-size": _Foreign(1, _NO_KV_TIERS, harmless=("0",)),
    "--kv-offloading-backend": _Foreign(1, _NO_KV_TIERS),
    "--kv-transfer-config": _Foreign(1, _NO_KV_TIERS),
    "--prefix-caching-hash-algo": _Foreign(1, note="block hashes are always of cryptographic quality"),
    "--max-num-partial-prefills": _Foreign(1, "one prompt is prefilled in parts at a time", harmless=("1",)),
    "--disable-sliding-window": _Foreign(0, "sliding windows are a property of the model"),
    "--max-seq-len-to-capture": _Foreign(1, note="steps of every length are recorded"),
    "--enable-sleep-mode": _Foreign(0, "sleep mode is not implemented"),
    # Compilation
    "--compilation-config": _Foreign(1, note=_NO_PASSES),
    "-O": _Foreign(1, note=_NO_PASSES),
    "-cc": _Foreign(1, note=_NO_PASSES),
    "--cudagraph-capture-sizes": _Foreign(_MANY, note="the engine chooses the sizes that it records"),
    # Features
    "--enable-lora": _Foreign(0, _NO_LORA),
    "--lora-modules": _Foreign(_MANY, _NO_LORA),
    "--max-loras": _Foreign(1, _NO_LORA),
    "--max-lora-rank": _Foreign(1, _NO_LORA),
    "--speculative-config": _Foreign(1, _NO_SPECULATION),
    "--enable-auto-tool-choice": _Foreign(0, _NO_TOOLS),
    "--tool-call-parser": _Foreign(1, _NO_TOOLS),
    "--tool-parser-plugin": _Foreign(1, _NO_TOOLS),
    "--reasoning-parser": _Foreign(1, "reasoning is not separated from the answer by this version"),
    "--structured-outputs-config": _Foreign(1, "structured output is not implemented"),
    "--guided-decoding-backend": _Foreign(1, "structured output is not implemented", harmless=("auto",)),
    "--logprobs-mode": _Foreign(
        1, "log-probabilities are those of the raw model", harmless=("raw_logprobs",)
    ),
    "--task": _Foreign(1, "only text generation is served", harmless=("auto", "generate")),
    "--runner": _Foreign(1, "only text generation is served", harmless=("auto", "generate")),
    "--limit-mm-per-prompt": _Foreign(1, _NO_MULTIMODAL),
    "--mm-processor-kwargs": _Foreign(1, _NO_MULTIMODAL),
    "--allowed-local-media-path": _Foreign(1, _NO_MULTIMODAL),
    # Server
    "--disable-log-requests": _Foreign(0, note="requests are logged only with --enable-log-requests"),
    "--max-log-len": _Foreign(1, note="prompts are not logged"),
    "--enable-log-outputs": _Foreign(0, "outputs are not logged"),
    "--enable-request-id-headers": _Foreign(0, note="X-Request-Id is always echoed"),
    "--enable-prompt-tokens-details": _Foreign(0, note="usage always reports cached tokens"),
    "--enable-force-include-usage": _Foreign(0, "ask for usage with stream_options.include_usage"),
    "--stream-interval": _Foreign(1, "every token is streamed when it is made", harmless=("1",)),
    "--response-role": _Foreign(1, "the role of answers is assistant", harmless=("assistant",)),
    "--chat-template-content-format": _Foreign(
        1, "the engine reads the format from the template", harmless=("auto",)
    ),
    "--disable-fastapi-docs": _Foreign(0, note="there are no documentation routes"),
    "--allow-credentials": _Foreign(0, "credentialed CORS requests are not supported"),
    "--allowed-methods": _Foreign(_MANY, note="every method that a route has is allowed"),
    "--allowed-headers": _Foreign(_MANY, note="every header is allowed"),
    "--ssl-ca-certs": _Foreign(1, "client certificates are not checked; put a proxy in front"),
    "--ssl-cert-reqs": _Foreign(1, "client certificates are not checked", harmless=("0",)),
    "--middleware": _Foreign(1, "middleware is not loaded; put a proxy in front"),
    "--otlp-traces-endpoint": _Foreign(1, "traces are not exported by this version"),
}


def drop_foreign(words: list[str]) -> list[str]:
    """`words` without the flags that ask for nothing; raises `ConfigError` for those that ask for something
    we do not do. Notes go to stderr.
    """
    kept: list[str] = []
    index = 0
    while index < len(words):
        name, equals, inline = words[index].partition("=")
        index += 1
        negated = name.startswith("--no-") and "--" + name.removeprefix("--no-") in _FLAGS
        flag = _FLAGS.get("--" + name.removeprefix("--no-") if negated else name)
        if flag is None or (negated and flag.arity):
            kept.append(words[index - 1])
            continue
        values = [inline] if equals else []
        if not equals:
            room = words[index : index + flag.arity]
            values = list(itertools.takewhile(lambda word: not word.startswith("--"), room))
            index += len(values)
        if negated or (values and values[0].lower() in flag.harmless):
            continue
        if flag.arity and not values:
            raise ConfigError(f"{name} expects a value")
        if not flag.note:
            raise ConfigError(f"{' '.join([name, *values])} is not supported: {flag.refusal}")
        print(f"pegainfer: note: {name} has no effect: {flag.note}", file=sys.stderr)
    return kept
