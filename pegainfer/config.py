"""What an engine and a server are told: frozen dataclasses whose field metadata makes the command-line flags.

Flag names, spellings and meanings are vLLM's. Nothing here is mutated: whoever decides an automatic value
makes a new object with `dataclasses.replace`. `EngineConfig.from_flat` builds the tree from flat names
(`LLM(...)`, the CLI).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pegainfer.errors import ConfigError

__all__ = [
    "CacheOptions",
    "EngineConfig",
    "LoadOptions",
    "ModelOptions",
    "SchedulerOptions",
    "ServerOptions",
    "SimulatorOptions",
    "option",
    "parse_size",
]


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    metavar: str = "",
    kind: str = "",
    flag: str = "",
) -> Any:
    """A dataclass field that is also a command-line flag.

    `kind` names a special parser: `size` takes suffixes (`8k`, `2GiB`), `size_or_auto` also `auto` (-1),
    `json` a JSON object, `list` several values. `flag` replaces the name made from the field's.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "kind": kind, "flag": flag}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Which model, and how its numbers are represented."""

    model: str = option(
        "smollm2", "A Hugging Face directory, a GGUF file, a hub id, or the built-in name `smollm2`."
    )
    served_model_name: tuple[str, ...] = option(
        (), "Names under which the API offers the model.", kind="list"
    )
    tokenizer: str | None = option(None, "Directory or hub id of the tokenizer; the model's own by default.")
    skip_tokenizer_init: bool = option(
        False, "Serve token ids in and out; for checkpoints without a tokenizer."
    )
    revision: str | None = option(None, "Branch, tag or commit of a hub model.")
    dtype: str = option(
        "auto",
        "Type of unquantised weights; `auto` takes the checkpoint's.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output in tokens; `auto` takes what the KV cache can hold.",
        kind="size_or_auto",
    )
    seed: int = option(0, "Seed of the engine: of dummy weights and of requests that bring none.")
    chat_template: str | None = option(
        None, "File with (or text of) a Jinja chat template that replaces the model's."
    )
    generation_config: str = option(
        "auto",
        "Where sampling defaults come from: `auto` (the model), `vllm` (none), or a directory.",
        metavar="SOURCE",
    )
    override_generation_config: dict[str, Any] = option(
        {}, "Sampling defaults that win over the model's.", kind="json"
    )
    max_logprobs: int = option(
        20, "Most log-probabilities per position that a request may ask for; -1: no limit."
    )
    hf_overrides: dict[str, Any] = option(
        {}, "Values that replace those of the model's config.json.", kind="json"
    )


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Where the weights come from."""

    load_format: str = option(
        "auto",
        "`auto` looks at the files; `dummy` makes random weights from the seed.",
        choices=("auto", "safetensors", "gguf", "dummy"),
    )
    download_dir: str | None = option(None, "Where hub models are kept; the Hugging Face cache by default.")
    hf_token: str | None = option(None, "Token for the hub; the environment's HF_TOKEN by default.")


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Memory for keys and values."""

    block_size: int | None = option(
        None, "Tokens per KV block, a multiple of 16; 16 on the CPU, 32 on a GPU by default."
    )
    gpu_memory_utilization: float = option(0.9, "Share of the device's memory that the engine may use.")
    kv_cache_memory_bytes: int | None = option(
        None, "Size of the KV cache; computed from free memory by default.", kind="size"
    )
    num_gpu_blocks_override: int | None = option(None, "Exact number of KV blocks, for tests.")
    enable_prefix_caching: bool = option(True, "Reuse the KV blocks of common prefixes.")


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How steps are made up."""

    max_num_seqs: int = option(256, "Most requests in one step.")
    max_num_batched_tokens: int | None = option(
        None, "Most tokens in one step; 512 on the CPU, 8192 on a GPU by default.", kind="size"
    )
    max_num_mixed_tokens: int | None = option(
        None,
        "Most tokens in one step that decodes, too: fewer mean shorter pauses in answers while prompts are "
        "computed; 2048 on a GPU by default, and no limit of its own with --max-num-batched-tokens.",
        kind="size",
    )
    enable_chunked_prefill: bool = option(True, "Split long prompts over steps and mix them with decode.")
    scheduling_policy: str = option("fcfs", "Order of service.", choices=("fcfs", "priority"))
    async_scheduling: bool | None = option(
        None, "Launch a step before the tokens of the one before it are known; on a GPU by default."
    )
    max_num_queued_reqs: int | None = option(None, "Most waiting requests; more are refused with 503.")


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """Serving without a model: made-up tokens at a given pace, to test and measure everything else."""

    simulate: bool = option(False, "Serve made-up tokens at a fixed pace instead of running a model.")
    sim_ttft_ms: float = option(
        20.0, "Milliseconds that a step of the simulated model takes longer when it begins a prompt."
    )
    sim_tpot_ms: float = option(10.0, "Milliseconds of each step of the simulated model.")
    sim_prefill_tokens_per_ms: float = option(
        20.0, "Prompt tokens that the simulated model computes per millisecond."
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The HTTP server."""

    host: str = option("0.0.0.0", "Address to listen on.")
    port: int = option(8000, "Port to listen on.")
    uds: str | None = option(None, "Unix domain socket to listen on instead.")
    api_key: tuple[str, ...] = option(
        (), "Keys that clients must present; PEGAINFER_API_KEY by default.", kind="list"
    )
    allowed_origins: tuple[str, ...] = option(("*",), "CORS origins.", kind="list")
    ssl_keyfile: str | None = option(None, "TLS key file.")
    ssl_certfile: str | None = option(None, "TLS certificate file.")
    root_path: str = option("", "Path prefix when behind a proxy.")
    shutdown_timeout: float = option(30.0, "Seconds that running requests may take to finish after SIGTERM.")
    sse_ping_interval: float = option(
        15.0, "Seconds between keep-alive comments on a silent stream; 0: never."
    )
    health_stall_timeout: float = option(
        30.0, "Seconds without progress, with work to do, after which /health is 503."
    )
    max_request_bytes: int = option(64 << 20, "Largest request body.", kind="size")
    enable_log_requests: bool = option(False, "Log each request.")
    disable_log_stats: bool = option(False, "Do not log throughput every 10 seconds.")
    disable_uvicorn_access_log: bool = option(False, "Do not log each HTTP request.")
    uvicorn_log_level: str = option(
        "info", "Log level of the HTTP server.", choices=("debug", "info", "warning", "error")
    )
    default_chat_template_kwargs: dict[str, Any] = option(
        {}, "Variables for every chat template rendering.", kind="json"
    )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything the engine process is told."""

    model: ModelOptions = ModelOptions()
    load: LoadOptions = LoadOptions()
    cache: CacheOptions = CacheOptions()
    scheduler: SchedulerOptions = SchedulerOptions()
    simulator: SimulatorOptions = SimulatorOptions()
    device: str = option(
        "auto", "Where to run; `auto` takes a GPU when there is one.", choices=("auto", "cpu", "cuda")
    )
    num_threads: int | None = option(None, "CPU threads; by default what the CPU quota and affinity allow.")
    enforce_eager: bool = option(False, "Launch every op of every step instead of replaying recorded graphs.")

    @classmethod
    def from_flat(cls, **values: Any) -> EngineConfig:
        """Build the tree from flat field names; raises `ConfigError` for a name that no part has."""
        parts = {
            "model": ModelOptions,
            "load": LoadOptions,
            "cache": CacheOptions,
            "scheduler": SchedulerOptions,
            "simulator": SimulatorOptions,
        }
        own: dict[str, Any] = {}
        for name, part in parts.items():
            names = {f.name for f in dataclasses.fields(part)}
            own[name] = part(**{key: values.pop(key) for key in list(values) if key in names})
        for f in dataclasses.fields(cls):
            if f.name in values and f.name not in parts:
                own[f.name] = values.pop(f.name)
        if values:
            raise ConfigError(f"unknown option: {', '.join(sorted(values))}")
        config = cls(**own)
        config.check()
        return config

    def check(self) -> None:
        """Raise `ConfigError` for values that no model could make right."""
        scheduler, cache = self.scheduler, self.cache
        if scheduler.max_num_seqs < 1:
            raise ConfigError(f"--max-num-seqs must be at least 1, got {scheduler.max_num_seqs}")
        for name in ("max_num_batched_tokens", "max_num_mixed_tokens"):
            count = getattr(scheduler, name)
            if count is not None and count < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {count}")
        if cache.block_size is not None and (cache.block_size < 1 or cache.block_size % 16):
            raise ConfigError(f"--block-size must be a multiple of 16, got {cache.block_size}")
        if not 0.0 < cache.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"--gpu-memory-utilization must be in (0, 1], got {cache.gpu_memory_utilization}"
            )
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"--num-threads must be at least 1, got {self.num_threads}")
        simulator = self.simulator
        if min(simulator.sim_ttft_ms, simulator.sim_tpot_ms) < 0 or simulator.sim_prefill_tokens_per_ms <= 0:
            raise ConfigError("--sim-ttft-ms, --sim-tpot-ms and --sim-prefill-tokens-per-ms must be positive")

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names under which the API offers the model, the first one being the main one."""
        return self.model.served_model_name or (self.model.model,)


_SUFFIXES = {
    "": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_size(text: str) -> int:
    """`8192`, `8k`, `1.5GiB` as a whole number; upper-case K, M and G alone are binary, as in vLLM. Raises
    `ConfigError`.
    """
    body = text.strip()
    digits = body.rstrip("kKmMgGtTiIbB")
    suffix = body[len(digits) :]
    if len(suffix) == 1 and suffix in "KMGT":
        suffix += "i"
    try:
        return int(float(digits) * _SUFFIXES[suffix.lower()])
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is not a size (examples: 8192, 8k, 2GiB)") from None
