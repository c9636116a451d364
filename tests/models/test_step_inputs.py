"""A step's inputs reach a device with memory of its own in one copy, before anything reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.runtime.cpu.device import CpuDevice, make_cpu_device
from pegainfer.runtime.dtypes import DType
from pegainfer.sampling_params import SamplingParams
from pegainfer.worker.build import build_worker
from tests.models.tiny_models import checkpoint
from tests.models.worker_driver import Driver, engine_config, make_worker


class CopyingMirror:
    """Two sides of which the device's shows what the host wrote only after an upload."""

    def __init__(self, device: CopyingCpu, nbytes: int, copies: int) -> None:
        self._device = device
        self.hosts = [np.zeros(nbytes, np.uint8) for _ in range(copies)]
        self.tensor = device.zeros((nbytes,), DType.uint8)

    def upload(self, nbytes: int, source: int) -> None:
        self._device.stream.synchronize()  # what was enqueued reads what was there
        self._device.uploads.append(nbytes)
        self.tensor.numpy()[:nbytes] = self.hosts[source][:nbytes]


class CopyingCpu(CpuDevice):
    """The CPU, as a device that does not share its memory with the host."""

    def __init__(self) -> None:
        made = make_cpu_device(2)
        super().__init__(made.library, 2)
        made.close()
        self.uploads: list[int] = []

    def mirror(self, nbytes: int, *, copies: int = 1) -> Any:
        return CopyingMirror(self, nbytes, copies)


PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.9, top_p=0.8, top_k=40),
    "scored": SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
}
EXTRAS = {
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.7, presence_penalty=0.4),
    "biased": SamplingParams(temperature=0.5, logit_bias={5: 4.0, 9: -100.0}, min_tokens=3),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=(3, 5, 8, 13)),
}


def answers(worker: Any, params: dict[str, SamplingParams]) -> list[Any]:
    """What requests in the same steps yield, the first from a prompt and some decodes."""
    driver = Driver(worker)
    for index, (name, values) in enumerate(params.items()):
        driver.add(name, [1 + index, 40, 7, 3 + index, 22], values, seed=index)
    found = [driver.step(dict.fromkeys(params, 5))]
    found += [driver.step(dict.fromkeys(params, 1)) for _ in range(6)]
    return found


def test_a_step_reads_what_was_uploaded_and_that_is_one_copy() -> None:
    device = CopyingCpu()
    apart = build_worker(engine_config(async_scheduling=True), checkpoint(), device=device)
    together = make_worker(checkpoint())
    assert answers(apart, {**PARAMS, **EXTRAS}) == answers(together, {**PARAMS, **EXTRAS})
    device.uploads.clear()
    plain = {name: PARAMS[name] for name in ("greedy", "drawn")}
    assert answers(apart, plain) == answers(together, plain)
    assert len(device.uploads) == 7
    apart.close()
    together.close()
