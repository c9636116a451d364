"""The first things that an engine's start does: the device is made while the checkpoint is opened."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from pegainfer.engine import build
from pegainfer.engine.build import build_engine_core
from pegainfer.engine.messages import Vocabulary
from pegainfer.errors import ConfigError, WeightsError
from pegainfer.runtime.cuda import device as cuda_device
from pegainfer.weights import loader
from pegainfer.worker import build as worker_build
from tests.models.worker_driver import engine_config

PATIENCE_S = 10.0


class Built(Exception):
    """Ends the start where the worker would be built."""


class Gpu:
    bound_by: threading.Thread | None = None

    def bind_thread(self) -> None:
        self.bound_by = threading.current_thread()


def start(device: str) -> None:
    build_engine_core(engine_config(device=device, num_threads=1), Vocabulary)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `build_worker` was given."""
    given: dict[str, Any] = {}

    def build_worker(config: Any, checkpoint: Any, **others: Any) -> Any:
        given.update(others, checkpoint=checkpoint)
        raise Built

    monkeypatch.setattr(worker_build, "build_worker", build_worker)
    return given


def test_the_checkpoint_is_opened_while_the_gpu_starts(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    opening, gpu = threading.Event(), Gpu()

    def make_gpu() -> Gpu:
        assert opening.wait(PATIENCE_S), "the checkpoint waits for the device"
        return gpu

    def open_checkpoint(*_: Any) -> str:
        opening.set()
        return "checkpoint"

    monkeypatch.setattr(cuda_device, "make_cuda_device", make_gpu)
    monkeypatch.setattr(loader, "open_checkpoint", open_checkpoint)
    with pytest.raises(Built):
        start("cuda")
    assert (given["device"], given["checkpoint"]) == (gpu, "checkpoint")
    assert gpu.bound_by is threading.current_thread()


def test_what_is_wrong_with_the_device_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def make_gpu() -> Gpu:
        assert failed.wait(PATIENCE_S)
        raise ConfigError("no GPU")

    def open_checkpoint(*_: Any) -> str:
        failed.set()
        raise WeightsError("no weights")

    monkeypatch.setattr(cuda_device, "make_cuda_device", make_gpu)
    monkeypatch.setattr(loader, "open_checkpoint", open_checkpoint)
    with pytest.raises(ConfigError, match="no GPU"):
        start("cuda")
    monkeypatch.setattr(cuda_device, "make_cuda_device", Gpu)
    with pytest.raises(WeightsError, match="no weights"):
        start("cuda")


def test_auto_falls_back_to_the_cpu(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def make_gpu() -> Gpu:
        raise ConfigError("too old")

    monkeypatch.setattr(build, "Path", lambda path: tmp_path)  # /dev/nvidiactl
    monkeypatch.setattr(cuda_device, "make_cuda_device", make_gpu)
    monkeypatch.setattr(loader, "open_checkpoint", lambda *_: "checkpoint")
    with pytest.raises(Built):
        start("auto")
    assert given["device"].kind == "cpu"
