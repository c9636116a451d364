"""A server of an FP8 checkpoint."""

from __future__ import annotations

from pathlib import Path

from tests.fp8_files import write_fp8
from tests.models.tiny_models import random_weights
from tests.server.conftest import CONFIG
from tests.server.servers import serving
from tests.toy_tokenizer import write_toy


def test_an_fp8_directory_is_served(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_fp8(directory, {**CONFIG, "torch_dtype": "bfloat16"}, random_weights(CONFIG, 3, head_scale=4.0))
    write_toy(directory)
    with serving(tmp_path / "log", str(directory)) as server:
        fields = {"prompt": "hello", "max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
        answer = server.complete(**fields)
        assert answer["usage"]["completion_tokens"] == 5
        assert server.complete(**fields)["choices"] == answer["choices"]
