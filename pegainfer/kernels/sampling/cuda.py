"""Sampling on a GPU: one scan by many blocks, then one block a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegainfer.errors import KernelError
from pegainfer.kernels.cuda_source import cuda_device
from pegainfer.ops.op import Launcher
from pegainfer.ops.sampling import SamplingFacts, sample, token_logprobs
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["SOURCE"]

SOURCE = KernelSource.of("sampling/sample.cu")
_THREADS = 1024
_SCAN_THREADS = 256
_SHARE = 8192  # logits a scanning block
_SCAN_BYTES = 24
_EDIT_BYTES = 20
_MAX_ROWS = 1024
_MAX_TOP = 256  # as in sample.cu


class _Scan:
    """The first pass over the logits, whose result both ops start from."""

    def __init__(self, facts: SamplingFacts, gpu: CudaDevice) -> None:
        self.shares = max(-(-facts.vocab_size // _SHARE), 1)
        self._facts = facts
        self._stream = gpu.stream.handle
        self._kernel = gpu.kernel(SOURCE, "scan_logits", signature="ppiip")
        self.result = gpu.workspace("sampling-scan", _MAX_ROWS * self.shares * _SCAN_BYTES)

    def __call__(self, logits: Tensor) -> None:
        rows, facts = logits.shape[0], self._facts
        if rows > _MAX_ROWS:
            raise KernelError(f"at most {_MAX_ROWS} rows can be sampled at once, got {rows}")
        self._kernel.launch(
            self._stream,
            (rows, self.shares),
            _SCAN_THREADS,
            logits.data_ptr,
            logits.strides[0],
            facts.vocab_size,
            facts.decodable_vocab_size,
            self.result.data_ptr,
        )


@sample.provider("cuda", DeviceKind.cuda)
def _bind_sample(facts: SamplingFacts, device: Device) -> Launcher | None:
    if facts.max_top_logprobs > _MAX_TOP:
        return None
    gpu = cuda_device(device)
    scan = _Scan(facts, gpu)
    kernel = gpu.kernel(SOURCE, "sample_rows", signature="p" * 26 + "iiii")
    stream = gpu.stream.handle

    def launch(
        *,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        presence: Tensor,
        frequency: Tensor,
        repetition: Tensor,
        seeds: Tensor,
        counters: Tensor,
        history: Tensor,
        history_start: Tensor,
        prompt_lens: Tensor,
        bias_ids: Tensor,
        bias_values: Tensor,
        bias_start: Tensor,
        allowed: Tensor | None,
        num_logprobs: Tensor,
        sampled: Tensor,
        logprobs: Tensor,
        ranks: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
    ) -> None:
        scan(logits)
        edits = gpu.workspace("sampling-edits", 4 * (history.numel + bias_ids.numel) * _EDIT_BYTES)
        pointers = (
            temperature,
            top_k,
            top_p,
            min_p,
            presence,
            frequency,
            repetition,
            seeds,
            counters,
            history,
            history_start,
            prompt_lens,
            bias_ids,
            bias_values,
            bias_start,
        )
        results = (num_logprobs, sampled, logprobs, ranks, top_ids, top_logprobs, edits)
        kernel.launch(
            stream,
            (logits.shape[0],),
            _THREADS,
            logits.data_ptr,
            logits.strides[0],
            scan.result.data_ptr,
            *(tensor.data_ptr for tensor in pointers),
            allowed.data_ptr if allowed else 0,
            *(tensor.data_ptr for tensor in results),
            facts.vocab_size,
            facts.decodable_vocab_size,
            scan.shares,
            facts.max_top_logprobs,
        )

    return launch


@token_logprobs.provider("cuda", DeviceKind.cuda)
def _bind_token_logprobs(facts: SamplingFacts, device: Device) -> Launcher | None:
    if facts.max_top_logprobs > _MAX_TOP:
        return None
    gpu = cuda_device(device)
    scan = _Scan(facts, gpu)
    kernel = gpu.kernel(SOURCE, "score_rows", signature="ppppippppiii")
    stream = gpu.stream.handle

    def launch(
        *,
        logits: Tensor,
        targets: Tensor,
        num_logprobs: int,
        logprobs: Tensor,
        ranks: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
    ) -> None:
        scan(logits)
        kernel.launch(
            stream,
            (logits.shape[0],),
            _THREADS,
            logits.data_ptr,
            logits.strides[0],
            scan.result.data_ptr,
            targets.data_ptr,
            num_logprobs,
            logprobs.data_ptr,
            ranks.data_ptr,
            top_ids.data_ptr,
            top_logprobs.data_ptr,
            facts.vocab_size,
            scan.shares,
            facts.max_top_logprobs,
        )

    return launch
