"""From a configuration and a checkpoint to a ready worker: formats, the memory sum, weights, warm-up."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pegainfer.config import EngineConfig
from pegainfer.errors import CapacityError
from pegainfer.kernels import load_providers
from pegainfer.kvcache.spec import KvCacheSpec
from pegainfer.layers.parameters import BuildContext, ParameterTable
from pegainfer.models.base import Model
from pegainfer.models.config import ModelConfig, read_config
from pegainfer.models.loading import check_names, kept_format, load_parameters, main_format, stored_bytes
from pegainfer.models.registry import architecture_of, resolve
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import NewRequest, ScheduledRequest, StepPlan
from pegainfer.weights.checkpoint import Checkpoint
from pegainfer.worker.base import WorkerInfo
from pegainfer.worker.input_batch import InputBatch
from pegainfer.worker.kernels_ahead import kernels_ahead
from pegainfer.worker.kv_storage import KvStorage
from pegainfer.worker.memory import KvPlan, plan_memory
from pegainfer.worker.model_runner import ModelRunner, StepLimits
from pegainfer.worker.sampler import Sampler
from pegainfer.worker.sampling_inputs import sampling_fields
from pegainfer.worker.staging import StagingBuffer
from pegainfer.worker.worker import Worker

__all__ = ["bind_ops", "build_worker"]

_LOGITS_BYTES = 64 << 20
_MIN_LOGITS_ROWS = 16
_DEFAULT_BLOCK_SIZE = {DeviceKind.cpu: 16, DeviceKind.cuda: 32}
"""Tokens. With 16 prefill attention of a Hopper GPU takes 12% longer: copies of few rows hold it up."""
_DEFAULT_STEP_TOKENS = {DeviceKind.cpu: 512, DeviceKind.cuda: 8192}
_DEFAULT_MIXED_TOKENS = {DeviceKind.cpu: 512, DeviceKind.cuda: 2048}


def build_worker(
    config: EngineConfig, checkpoint: Checkpoint, *, device: Device, decodable_vocab_size: int | None = None
) -> Worker:
    """A worker that is ready for its first step.

    `decodable_vocab_size` bounds the ids that may be sampled; None is the whole vocabulary. Raises
    `ConfigError`, `UnsupportedModelError`, `WeightsError`, and `CapacityError` before any weight is read.
    """
    with kernels_ahead(device, lambda planned: bind_ops(config, checkpoint, device=planned)):
        return _build_worker(config, checkpoint, device=device, decodable_vocab_size=decodable_vocab_size)


def bind_ops(config: EngineConfig, checkpoint: Checkpoint, *, device: Device) -> Model:
    """Bind every op that `build_worker` binds, of sampling and of the model, which is returned without its
    weights.
    """
    model_config = read_config(checkpoint.config, architecture_of(checkpoint.config))
    dtype = _dtype(config, model_config, checkpoint)
    model = _build_model(config, model_config, checkpoint, device=device, dtype=dtype)
    staging = StagingBuffer(device, sampling_fields(1))
    _make_sampler(config, device, staging, vocab_size=model.vocab_size, decodable_vocab_size=model.vocab_size)
    return model


def _build_worker(
    config: EngineConfig, checkpoint: Checkpoint, *, device: Device, decodable_vocab_size: int | None
) -> Worker:
    phases: dict[str, float] = {}
    with _phase(phases, "build model"):
        architecture = architecture_of(checkpoint.config)
        model_config = read_config(checkpoint.config, architecture)
        dtype = _dtype(config, model_config, checkpoint)
        model = _build_model(config, model_config, checkpoint, device=device, dtype=dtype)
        check_names(model.parameters, checkpoint.names())
        spec = KvCacheSpec(model.kv_specs, _block_size(config, device))
        limits = _step_limits(config, model_config, device)
        plan = plan_memory(
            config,
            model,
            spec,
            context_limit=model_config.max_position_embeddings,
            step_bytes=limits.nbytes(model),
            memory=device.memory_info(),
            kind=device.kind,
        )
        batch = _make_batch(config, plan, spec.block_size)
    with (
        _phase(phases, "load weights"),
        _progress(model.parameters, checkpoint) as on_tensor,
        device.loading(),
    ):
        load_parameters(model.parameters, checkpoint, on_tensor=on_tensor)
    with _phase(phases, "allocate memory"):
        model.prepare(plan.max_model_len)
        info = WorkerInfo(
            architecture=architecture,
            device_name=device.name,
            dtype=dtype,
            weight_format=main_format(model.parameters),
            weight_bytes=model.weight_bytes,
            num_parameters=model.num_parameters,
            vocab_size=model.vocab_size,
            decodable_vocab_size=min(decodable_vocab_size or model.vocab_size, model.vocab_size),
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=limits.num_tokens,
            max_num_mixed_tokens=_mixed_tokens(config, limits, device),
            block_size=spec.block_size,
            num_blocks=plan.num_blocks,
            kv_cache_bytes=plan.num_blocks * spec.block_bytes,
            max_steps_in_flight=_steps_in_flight(config, device),
            phases=phases,
        )
        storage = KvStorage(device, spec, num_blocks=plan.num_blocks)
        worker = _assemble(config, model, storage, batch, device=device, limits=limits, info=info)
    with _phase(phases, "warm up"):
        _warm_up(worker)
        worker.rehearse()
    return worker


@contextmanager
def _phase(phases: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    phases[name] = time.perf_counter() - start


@contextmanager
def _progress(table: ParameterTable, checkpoint: Checkpoint) -> Iterator[Callable[[int], object]]:
    """A bar of the bytes read, when a person is watching."""
    with tqdm(
        desc="Loading weights",
        total=stored_bytes(table, checkpoint),
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def _dtype(config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint) -> DType:
    """What the model counts as: as asked for, as its configuration says, or as most of its tensors are."""
    if config.model.dtype != "auto":
        return DType(config.model.dtype)
    if model_config.dtype is not None:
        return model_config.dtype
    formats = {checkpoint.info(name).format for name in checkpoint.names() if "norm" not in name}
    if formats == {WeightFormat.f32}:
        return DType.float32
    is_half = WeightFormat.f16 in formats and WeightFormat.bf16 not in formats
    return DType.float16 if is_half else DType.bfloat16


def _build_model(
    config: EngineConfig,
    model_config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    device: Device,
    dtype: DType,
) -> Model:
    """Bind every op, by the formats in the checkpoint's headers."""
    load_providers(device.kind)
    present = set(checkpoint.names())
    convert = config.model.dtype != "auto"

    def format_of(name: str) -> WeightFormat:
        # A missing tensor is reported with all the others, once they are known.
        stored = checkpoint.info(name).format if name in present else WeightFormat.bf16
        return kept_format(stored, dtype, convert=convert, kind=device.kind)

    context = BuildContext(
        table=ParameterTable(device, format_of),
        act=device.activation_dtype(dtype),
        kv_dtype=DType.float32 if dtype is DType.float32 else DType.bfloat16,
        block_size=_block_size(config, device),
    )
    return resolve(model_config.architecture)(model_config, context)


def _step_limits(config: EngineConfig, model_config: ModelConfig, device: Device) -> StepLimits:
    scheduler = config.scheduler
    context = config.model.max_model_len
    if context is None or context < 1:
        context = model_config.max_position_embeddings
    num_tokens = scheduler.max_num_batched_tokens
    if num_tokens is None:
        num_tokens = _DEFAULT_STEP_TOKENS[device.kind]
        if not scheduler.enable_chunked_prefill:
            num_tokens = max(num_tokens, context)
    num_requests = min(scheduler.max_num_seqs, num_tokens)
    logits_rows = max(_MIN_LOGITS_ROWS, _LOGITS_BYTES // (4 * model_config.vocab_size))
    return StepLimits(
        num_tokens=num_tokens,
        num_requests=num_requests,
        max_blocks=-(-context // _block_size(config, device)),
        num_logits=min(logits_rows, num_tokens),
    )


def _mixed_tokens(config: EngineConfig, limits: StepLimits, device: Device) -> int:
    scheduler = config.scheduler
    wanted = scheduler.max_num_mixed_tokens
    if wanted is None and scheduler.max_num_batched_tokens is None:
        wanted = _DEFAULT_MIXED_TOKENS[device.kind]
    return min(wanted or limits.num_tokens, limits.num_tokens)


def _block_size(config: EngineConfig, device: Device) -> int:
    return config.cache.block_size or _DEFAULT_BLOCK_SIZE[device.kind]


def _steps_in_flight(config: EngineConfig, device: Device) -> int:
    """Two, so that the device finds the next step when it is done with one, where it works by itself."""
    asked = config.scheduler.async_scheduling
    return 2 if (device.is_asynchronous if asked is None else asked) else 1


def _make_batch(config: EngineConfig, plan: KvPlan, block_size: int) -> InputBatch:
    try:
        return InputBatch(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=plan.max_model_len,
            block_size=block_size,
        )
    except MemoryError:
        raise CapacityError(
            f"tables of {config.scheduler.max_num_seqs} requests of {plan.max_model_len} tokens do not fit "
            "in memory: lower --max-num-seqs or --max-model-len"
        ) from None


def _assemble(
    config: EngineConfig,
    model: Model,
    storage: KvStorage,
    batch: InputBatch,
    *,
    device: Device,
    limits: StepLimits,
    info: WorkerInfo,
) -> Worker:
    limits = dataclasses.replace(limits, max_blocks=batch.max_blocks)
    staging = StagingBuffer(device, limits.staging_fields, copies=info.max_steps_in_flight)
    runner = ModelRunner(
        model,
        device,
        storage=storage,
        staging=staging,
        limits=limits,
        use_graphs=not config.enforce_eager,
    )
    sampler = _make_sampler(
        config, device, staging, vocab_size=info.vocab_size, decodable_vocab_size=info.decodable_vocab_size
    )
    return Worker(runner, sampler, batch, device=device, info=info)


def _make_sampler(
    config: EngineConfig,
    device: Device,
    staging: StagingBuffer,
    *,
    vocab_size: int,
    decodable_vocab_size: int,
) -> Sampler:
    return Sampler(
        device,
        staging,
        vocab_size=vocab_size,
        decodable_vocab_size=decodable_vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_logprobs=config.model.max_logprobs,
        max_steps_in_flight=_steps_in_flight(config, device),
    )


def _warm_up(worker: Worker) -> None:
    """One token through everything, so that a broken kernel shows before the first request does."""
    request = NewRequest("warm-up", [0], 1, SamplingParams(temperature=0.0), seed=0)
    step = ScheduledRequest("warm-up", 1, 0, [0], samples=True)
    worker.submit(StepPlan(-2, [request], [step], []))
    worker.collect()
    worker.submit(StepPlan(-1, [], [], ["warm-up"]))
    worker.collect()
