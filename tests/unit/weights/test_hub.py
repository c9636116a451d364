"""Hub ids, against a stand-in for the hub over real HTTP and with the real client library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegainfer.errors import WeightsError
from pegainfer.weights.hub import Wanted, choose_files
from tests.unit.weights.hub_server import Repo, serve_hub

GOLDEN = Path(__file__).parents[2] / "golden" / "qwen2"
# What `pegainfer serve org/model` does before it builds anything; prints the outcome.
PROGRAM = """
import sys
from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.errors import PegaInferError
from pegainfer.weights.loader import open_checkpoint, resolve_model
name, revision, token, directory = (value or None for value in sys.argv[1:])
model, load = ModelOptions(model=name, revision=revision), LoadOptions(hf_token=token, download_dir=directory)
try:
    path = resolve_model(model, load)
    print(path)
    print(len(open_checkpoint(model, load).names()) if path.is_dir() else path.stat().st_size)
except PegaInferError as error:
    print(type(error).__name__, error)
"""


def golden_repo() -> Repo:
    files = {name: (GOLDEN / name).read_bytes() for name in ("config.json", "model.safetensors")}
    others = {
        "README.md": b"x",
        "model.gguf": b"x",
        "pytorch_model.bin": b"x",
        "original/a.safetensors": b"x",
    }
    return Repo(files | others | {"tokenizer.json": b"{}"})


def run(
    endpoint: str,
    home: Path,
    name: str,
    *,
    revision: str = "",
    token: str = "",
    directory: str = "",
    **env: str,
) -> list[str]:
    """Lines that the program prints."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, revision, token, directory],
        env=clean | settings | {"HF_HUB_DISABLE_XET": "1"} | env,
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_downloads_what_is_needed_and_serves_it_without_a_network(tmp_path: Path) -> None:
    repo = golden_repo()
    with serve_hub({"org/model": repo}) as endpoint:
        path, count = run(endpoint, tmp_path, "org/model")
        assert int(count) == 38
        assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
        downloads = [request for request in repo.requests if request.startswith("GET org")]
        assert run(endpoint, tmp_path, "org/model") == [path, count]
        assert [request for request in repo.requests if request.startswith("GET org")] == downloads
    assert run(endpoint, tmp_path, "org/model") == [path, count]
    assert run(endpoint, tmp_path, "org/model", HF_HUB_OFFLINE="1") == [path, count]
    (line,) = run(endpoint, tmp_path, "org/other", HF_HUB_OFFLINE="1")
    assert line.startswith("WeightsError org/other is not in the local cache")


def test_tokens_revisions_and_directories(tmp_path: Path) -> None:
    repo = golden_repo()
    repo.token, repo.revisions = "secret", ("main", "v2")
    with serve_hub({"org/model": repo}) as endpoint:
        (line,) = run(endpoint, tmp_path, "org/model")
        assert line.startswith("WeightsError org/model is gated")
        assert "--hf-token" in line
        (line,) = run(endpoint, tmp_path, "org/model", token="secret", revision="v3")
        assert line.startswith("WeightsError org/model has no revision 'v3'")
        path, _ = run(endpoint, tmp_path, "org/model", token="secret", revision="v2")
        assert path.startswith(str(tmp_path / "hub"))
        kept = tmp_path / "kept"
        path, _ = run(endpoint, tmp_path, "org/model", directory=str(kept), HF_TOKEN="secret")
        assert path.startswith(str(kept))


def test_missing_models_and_networks(tmp_path: Path) -> None:
    with serve_hub({}) as endpoint:
        (line,) = run(endpoint, tmp_path, "org/model")
        assert line.startswith(f"WeightsError {endpoint} has no model org/model, or it is private")
    (line,) = run(endpoint, tmp_path, "org/model")
    assert line.startswith("WeightsError org/model is not in the local cache and cannot be fetched")


def test_gguf_repositories(tmp_path: Path) -> None:
    repo = Repo({"a-Q8_0.gguf": b"12345", "sub/b.gguf": b"123", "README.md": b"x"})
    with serve_hub({"org/gguf": repo}) as endpoint:
        path, size = run(endpoint, tmp_path, "org/gguf/sub/b.gguf")
        assert (Path(path).name, size) == ("b.gguf", "3")
        (line,) = run(endpoint, tmp_path, "org/gguf/c.gguf")
        assert line == "WeightsError org/gguf has no file c.gguf; it has a-Q8_0.gguf, sub/b.gguf"
        *_, line = run(endpoint, tmp_path, "org/gguf")
        assert line.endswith("a-Q8_0.gguf: this is not a GGUF file")


SHARDS = ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"]


@pytest.mark.parametrize(
    ("names", "wanted", "chosen"),
    [
        (["config.json", "model.safetensors", "x.gguf"], "everything", ["config.json", "model.safetensors"]),
        ([*SHARDS, "consolidated.safetensors"], "everything", SHARDS),
        (["config.json", "x.gguf", "y.bin"], "everything", ["config.json", "x.gguf"]),
        (
            ["tokenizer.json", "chat_template.jinja", *SHARDS],
            "tokenizer",
            ["tokenizer.json", "chat_template.jinja"],
        ),
        (
            ["additional_chat_templates/t.jinja", "x.gguf"],
            "tokenizer",
            ["additional_chat_templates/t.jinja", "x.gguf"],
        ),
        (["config.json"], "tokenizer", ["config.json"]),
    ],
)
def test_files_that_serving_needs(names: list[str], wanted: str, chosen: list[str]) -> None:
    assert choose_files(names, repo="org/m", gguf=None, wanted=Wanted(wanted)) == chosen


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        (["config.json", "pytorch_model.bin"], "no weights"),
        (["a.gguf", "b.gguf"], "org/m/FILE, of a.gguf, b.gguf"),
    ],
)
def test_repositories_without_usable_weights(names: list[str], problem: str) -> None:
    with pytest.raises(WeightsError, match=problem):
        choose_files(names, repo="org/m", gguf=None, wanted=Wanted.everything)
