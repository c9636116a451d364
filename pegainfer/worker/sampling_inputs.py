"""The sampling parameters of every row, and the arrays that the `sample` op reads in a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from pegainfer.scheduler.plan import NewRequest
from pegainfer.worker.input_batch import InputBatch
from pegainfer.worker.staging import RaggedStaging, StagingBuffer

__all__ = ["SamplingInputs", "sampling_fields", "slice_arguments"]

Array = np.ndarray[Any, Any]

_PARAMETERS = {
    "temperature": DType.float32,
    "top_k": DType.int32,
    "top_p": DType.float32,
    "min_p": DType.float32,
    "presence": DType.float32,
    "frequency": DType.float32,
    "repetition": DType.float32,
    "seeds": DType.uint64,
    "num_logprobs": DType.int32,
}
_RAGGED = {"history": DType.int32, "bias_ids": DType.int32, "bias_values": DType.float32}
_NOTHING = np.zeros(1, np.int32)
_SEED_MASK = (1 << 64) - 1


def sampling_fields(num_rows: int) -> dict[str, tuple[tuple[int, ...], DType]]:
    """Arrays of the staging for up to `num_rows` rows that sample in a step."""
    return {
        **{name: ((num_rows,), dtype) for name, dtype in _PARAMETERS.items()},
        "counters": ((num_rows,), DType.int64),
        "prompt_lens": ((num_rows,), DType.int32),
        "history_start": ((num_rows + 1,), DType.int32),
        "bias_start": ((num_rows + 1,), DType.int32),
    }


@dataclass(frozen=True, slots=True)
class _Extras:
    """What few requests ask for: penalties, biases, a least number of tokens, a closed set of tokens."""

    has_penalties: bool
    bias: dict[int, float]
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    allowed: Array | None  # uint32 [ceil(vocab_size / 32)]

    def bias_after(self, num_output_tokens: int) -> dict[int, float]:
        """Biases of the next token: until `min_tokens` are there, nothing may end the request."""
        if num_output_tokens >= self.min_tokens:
            return self.bias
        return {**self.bias, **dict.fromkeys(self.stop_token_ids, -np.inf)}


class SamplingInputs:
    """Parameters of up to `max_num_seqs` rows. Those of a step go to the `sampling_fields` of `staging`."""

    def __init__(
        self, device: Device, staging: StagingBuffer, *, vocab_size: int, max_num_seqs: int, copies: int
    ) -> None:
        self._vocab_size = vocab_size
        self._rows = {name: np.zeros(max_num_seqs, dtype.numpy) for name, dtype in _PARAMETERS.items()}
        self._extras: dict[int, _Extras] = {}
        self._staging = staging
        self._tensors: dict[str, Tensor | None] = {
            name: staging.tensors[name] for name in sampling_fields(max_num_seqs)
        }
        self._ragged = {name: RaggedStaging(device, dtype, copies=copies) for name, dtype in _RAGGED.items()}
        self._empty = {name: staging.put(_NOTHING) for name, staging in self._ragged.items()}
        self._allowed = RaggedStaging(device, DType.uint32, copies=copies)

    def add(self, row: int, request: NewRequest) -> None:
        """Take the parameters of a request."""
        params = request.params
        values = {
            "temperature": params.temperature,
            "top_k": min(max(params.top_k, 0), self._vocab_size),
            "top_p": params.top_p,
            "min_p": params.min_p,
            "presence": params.presence_penalty,
            "frequency": params.frequency_penalty,
            "repetition": params.repetition_penalty,
            "seeds": request.seed & _SEED_MASK,
            "num_logprobs": self.width_of(params.logprobs),
        }
        for name, value in values.items():
            self._rows[name][row] = value
        extras = self._extras_of(request)
        self._extras.pop(row, None)
        if extras is not None:
            self._extras[row] = extras

    def width_of(self, count: int | None) -> int:
        """How many alternatives a `logprobs` means: None is -1 (not even the token's own), -1 all."""
        if count is None:
            return -1
        return self._vocab_size if count < 0 else min(count, self._vocab_size)

    def gather(
        self, rows: Array, batch: InputBatch, feed: Callable[[Tensor], None]
    ) -> tuple[dict[str, Tensor | None], Array]:
        """Arguments of `sample` for `rows`, one step's inputs, and the host's copy of `num_logprobs`.

        Most lie in the staging, which is uploaded with the step's other inputs. They live until the next
        call. `feed` enqueues the replacement of pending tokens.
        """
        count = len(rows)
        host = self._staging.host
        for name, values in self._rows.items():
            host[name][:count] = values[rows]
        prompts = batch.num_prompt_tokens[rows]
        host["counters"][:count] = batch.num_tokens[rows] - prompts
        arguments: dict[str, Tensor | None] = {**self._tensors, **self._empty, "allowed": None}
        host["history_start"][: count + 1] = 0
        host["bias_start"][: count + 1] = 0
        extras = [self._extras.get(int(row)) for row in rows] if self._extras else []
        if any(extras):
            host["prompt_lens"][:count] = prompts
            history = self._gather_history(rows, extras, batch)
            staged = arguments["history"] = self._ragged["history"].put(history)
            if history.min() < 0:
                feed(staged)
            self._gather_bias(extras, host["counters"], arguments)
            self._gather_allowed(extras, arguments)
        return arguments, self._rows["num_logprobs"][rows]

    def _gather_history(self, rows: Array, extras: list[_Extras | None], batch: InputBatch) -> Array:
        parts = [
            batch.history(int(row)) if extra and extra.has_penalties else batch.history(int(row))[:0]
            for row, extra in zip(rows, extras, strict=True)
        ]
        np.cumsum([len(part) for part in parts], out=self._staging.host["history_start"][1 : len(parts) + 1])
        return np.concatenate([*parts, _NOTHING])

    def _gather_bias(
        self, extras: list[_Extras | None], counters: Array, arguments: dict[str, Tensor | None]
    ) -> None:
        biases = [
            extra.bias_after(count) if extra else {}
            for extra, count in zip(extras, counters[: len(extras)].tolist(), strict=True)
        ]
        np.cumsum([len(bias) for bias in biases], out=self._staging.host["bias_start"][1 : len(biases) + 1])
        ids = [token for bias in biases for token in bias]
        values = [value for bias in biases for value in bias.values()]
        arguments["bias_ids"] = self._ragged["bias_ids"].put(np.array([*ids, 0], np.int32))
        arguments["bias_values"] = self._ragged["bias_values"].put(np.array([*values, 0.0], np.float32))

    def _gather_allowed(self, extras: list[_Extras | None], arguments: dict[str, Tensor | None]) -> None:
        if any(extra and extra.allowed is not None for extra in extras):
            everything = np.full(-(-self._vocab_size // 32), 0xFFFFFFFF, np.uint32)
            masks = [extra.allowed if extra and extra.allowed is not None else everything for extra in extras]
            arguments["allowed"] = self._allowed.put(np.stack(masks))

    def _extras_of(self, request: NewRequest) -> _Extras | None:
        params = request.params
        has_penalties = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        bias = {token: value for token, value in (params.logit_bias or {}).items() if self._is_token(token)}
        allowed = self._mask(params.allowed_token_ids) if params.allowed_token_ids is not None else None
        if not has_penalties and not bias and allowed is None and params.min_tokens == 0:
            return None
        stops = tuple(filter(self._is_token, request.stop_token_ids))
        return _Extras(has_penalties, bias, params.min_tokens, stops, allowed)

    def _mask(self, token_ids: tuple[int, ...]) -> Array:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[token for token in token_ids if self._is_token(token)]] = 1
        return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)

    def _is_token(self, token: int) -> bool:
        return 0 <= token < self._vocab_size


def slice_arguments(arguments: dict[str, Tensor | None], start: int, stop: int) -> dict[str, Tensor | None]:
    """The arguments of the rows `[start, stop)` of a step."""
    return {
        name: tensor
        if tensor is None or name in _RAGGED
        else tensor.slice(0, start, stop + 1 if name.endswith("_start") else stop)
        for name, tensor in arguments.items()
    }
