"""Sampling and log-probabilities on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import address_of, native_kernel
from pegainfer.ops.op import Launcher
from pegainfer.ops.sampling import SamplingFacts, sample, token_logprobs
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@sample.provider("native", DeviceKind.cpu)
def _bind_sample(facts: SamplingFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_sample")
    if kernel is None:
        return None
    vocab_size, decodable = facts.vocab_size, facts.decodable_vocab_size

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
        kernel(
            logits.data_ptr,
            logits.strides[0],
            logits.shape[0],
            vocab_size,
            decodable,
            temperature.data_ptr,
            top_k.data_ptr,
            top_p.data_ptr,
            min_p.data_ptr,
            presence.data_ptr,
            frequency.data_ptr,
            repetition.data_ptr,
            seeds.data_ptr,
            counters.data_ptr,
            history.data_ptr,
            history_start.data_ptr,
            prompt_lens.data_ptr,
            bias_ids.data_ptr,
            bias_values.data_ptr,
            bias_start.data_ptr,
            address_of(allowed),
            allowed.strides[0] if allowed is not None else 0,
            num_logprobs.data_ptr,
            sampled.data_ptr,
            logprobs.data_ptr,
            ranks.data_ptr,
            top_ids.data_ptr,
            top_logprobs.data_ptr,
            top_ids.shape[1],
        )

    return launch


@token_logprobs.provider("native", DeviceKind.cpu)
def _bind_token_logprobs(facts: SamplingFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_token_logprobs")
    if kernel is None:
        return None
    vocab_size = facts.vocab_size

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
        kernel(
            logits.data_ptr,
            logits.strides[0],
            logits.shape[0],
            vocab_size,
            targets.data_ptr,
            num_logprobs,
            logprobs.data_ptr,
            ranks.data_ptr,
            top_ids.data_ptr,
            top_logprobs.data_ptr,
            top_ids.shape[1],
        )

    return launch
