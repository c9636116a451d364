"""The CPU's stream, graphs and thread pool."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pegainfer.errors import KernelError
from pegainfer.kernels import load_providers
from pegainfer.ops.activation import SiluAndMulFacts, silu_and_mul
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import bind
from pegainfer.runtime.cpu import make_cpu_device
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat

load_providers(DeviceKind.cpu)

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture(params=[1, 2])
def device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = make_cpu_device(request.param)
    assert device.library is not None, "the tests need the compiled kernels"
    yield device
    device.close()


def test_work_happens_in_order_when_waited_for(device: CpuDevice) -> None:
    ran: list[int] = []
    for number in range(3):
        device.stream.call(lambda number=number: ran.append(number))
    assert ran == []
    device.stream.synchronize()
    assert ran == [0, 1, 2]


def test_a_graph_replays_with_the_same_addresses(device: CpuDevice) -> None:
    launch = bind(silu_and_mul, SiluAndMulFacts(64, DType.float32), device)
    gate_up = np.ones((3, 128), np.float32)
    x, out = device.from_numpy(gate_up), device.zeros((3, 64), DType.float32)
    device.stream.begin_capture()
    launch(gate_up=x, out=out)
    with pytest.raises(KernelError, match="captured"):
        device.stream.synchronize()
    graph = device.stream.end_capture()
    assert not device.to_numpy(out).any()  # recorded, not run
    for value in (1.0, 2.0):
        gate_up[:] = value
        graph.replay()
        expected = value / (1 + np.exp(-value)) * value
        assert np.allclose(device.to_numpy(out), expected, rtol=1e-6)
    with pytest.raises(KernelError):
        device.stream.end_capture()


def test_a_failing_kernel_is_an_error_and_no_more(device: CpuDevice) -> None:
    facts = EmbeddingFacts(10, 8, WeightFormat.f32, DType.float32, tied=False)
    launch = bind(embedding, facts, device)
    table = device.from_numpy(np.arange(80, dtype=np.float32).view(np.uint8))
    out = device.zeros((2, 8), DType.float32)
    ids = np.array([3, 99], np.int32)
    launch(token_ids=device.from_numpy(ids), weight=table, out=out)
    with pytest.raises(KernelError, match="embedding table"):
        device.stream.synchronize()
    ids[1] = 9
    launch(token_ids=device.from_numpy(ids), weight=table, out=out)
    assert device.to_numpy(out).tolist() == [list(range(24, 32)), list(range(72, 80))]


def test_a_failing_call_drops_what_follows(device: CpuDevice) -> None:
    ran: list[str] = []
    device.stream.call(lambda: ran.append(str(1 // 0)))
    device.stream.call(lambda: ran.append("after"))
    with pytest.raises(ZeroDivisionError):
        device.stream.synchronize()
    device.stream.synchronize()
    assert ran == []


def test_an_idle_pool_burns_no_time() -> None:
    device = make_cpu_device(2)
    launch = bind(silu_and_mul, SiluAndMulFacts(64, DType.float32), device)
    x, out = device.zeros((4, 128), DType.float32), device.zeros((4, 64), DType.float32)
    launch(gate_up=x, out=out)
    device.stream.synchronize()
    time.sleep(0.1)
    before = os.times()
    time.sleep(0.5)
    after = os.times()
    assert after.user + after.system - before.user - before.system < 0.05
    device.close()


def test_without_compiled_kernels_it_says_so_once_and_still_computes() -> None:
    code = (
        "import logging; logging.basicConfig()\n"
        "from pegainfer import LLM, SamplingParams\n"
        f"llm = LLM({str(GOLDEN / 'llama_smol')!r}, skip_tokenizer_init=True, device='cpu')\n"
        "out = llm.generate([{'prompt_token_ids': [5, 6, 7]}], SamplingParams(temperature=0, max_tokens=4),"
        " use_tqdm=False)\n"
        "print(len(out[0].outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "PEGAINFER_DISABLE_NATIVE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60, check=False
    )
    assert done.stdout.strip() == "4", done.stderr
    assert done.stderr.count("everything runs on NumPy") == 1
