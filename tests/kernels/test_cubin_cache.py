"""The cache of CUDA kernels: files named by everything that shapes a cubin, trusted only when whole."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from pegainfer.errors import KernelError
from pegainfer.runtime.cuda import module
from pegainfer.runtime.cuda.module import KernelSource, compile_cubin, cubin_path, load_cubin

ARCH = "sm_90a"
SOURCE = KernelSource.of("gather/gather_rows.cu", SIZE=64, THREADS=32, ACT_BF16=1)
ELF = b"\x7fELF"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    return tmp_path


def test_a_second_load_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_cubin(SOURCE, ARCH)
    assert first.startswith(ELF)
    monkeypatch.setattr(module, "compile_cubin", None)
    assert load_cubin(SOURCE, ARCH) == first


def test_the_name_depends_on_defines_and_architecture() -> None:
    more = KernelSource.of(SOURCE.path, SIZE=64, THREADS=64, ACT_BF16=1)
    paths = {cubin_path(SOURCE, ARCH), cubin_path(SOURCE, "sm_80"), cubin_path(more, ARCH)}
    assert len(paths) == 3
    assert cubin_path(KernelSource.of(SOURCE.path, THREADS=32, ACT_BF16=1, SIZE=64), ARCH) in paths


def test_the_name_depends_on_source_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kernels"
    (folder / "include").mkdir(parents=True)
    source, header = folder / "one.cu", folder / "include" / "one.cuh"
    monkeypatch.setattr(module, "_KERNELS", folder)
    seen = set()
    for text, included in (("", ""), ("// more", ""), ("// more", "// and more"), ("", "// more")):
        source.write_text(text)
        header.write_text(included)
        module._headers.cache_clear()
        seen.add(cubin_path(KernelSource.of("one.cu"), ARCH))
    module._headers.cache_clear()
    assert len(seen) == 4


def fake_toolkit(folder: Path, version: str) -> Path:
    folder.mkdir()
    (folder / "cuda_runtime_api.h").write_text(f"/* text */\n#define CUDART_VERSION  {version}\n")
    return folder


def test_the_name_depends_on_what_the_toolkit_is_not_on_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = fake_toolkit(tmp_path / "here", "13000"), fake_toolkit(tmp_path / "there", "13000")
    other, bare = fake_toolkit(tmp_path / "other", "13010"), tmp_path / "bare"
    paths = []
    for toolkit in (here, there, other, bare, None):
        monkeypatch.setattr(module, "_toolkit_include", lambda toolkit=toolkit: toolkit)
        module._versions.cache_clear()
        paths.append(cubin_path(SOURCE, ARCH))
    module._versions.cache_clear()
    assert paths[0] == paths[1]
    assert paths[3] == paths[4]
    assert len(set(paths)) == 3


def test_missing_headers_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_toolkit_include", lambda: None)
    with pytest.raises(KernelError, match="CUDA headers are missing: pip install"):
        compile_cubin(SOURCE, ARCH)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_permissions_that_the_umask_leaves(umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        load_cubin(SOURCE, ARCH)
    finally:
        os.umask(before)
    assert cubin_path(SOURCE, ARCH).stat().st_mode & 0o777 == mode


def test_a_write_that_fails_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert load_cubin(SOURCE, ARCH).startswith(ELF)
    assert [path for path in cache.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "short", "plain cubin", "text"])
def test_a_damaged_or_foreign_file_is_rebuilt(damage: str) -> None:
    cubin = load_cubin(SOURCE, ARCH)
    path = cubin_path(SOURCE, ARCH)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    path.write_bytes(
        {
            "truncated": whole[:-100],
            "flipped": bytes(flipped),
            "empty": b"",
            "short": whole[:32],
            "plain cubin": cubin,
            "text": b"not a cubin" * 100,
        }[damage]
    )
    assert load_cubin(SOURCE, ARCH) == cubin
    assert path.read_bytes() == whole


def _load(barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(load_cubin(SOURCE, ARCH))


def test_processes_that_write_at_once_all_get_a_whole_cubin(cache: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_load, args=(barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    cubins = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
        process.close()
    results.close()
    assert cubins == {compile_cubin(SOURCE, ARCH)}
    assert [path for path in cache.rglob("*") if path.is_file()] == [cubin_path(SOURCE, ARCH)]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PEGAINFER_CACHE", str(blocked / "cache"))
    assert load_cubin(SOURCE, ARCH).startswith(ELF)
    folder = tmp_path / "read-only"
    monkeypatch.setenv("PEGAINFER_CACHE", str(folder))
    cubin_path(SOURCE, ARCH).parent.mkdir(parents=True)
    os.chmod(cubin_path(SOURCE, ARCH).parent, 0o500)
    assert load_cubin(SOURCE, ARCH).startswith(ELF)


def test_a_source_that_does_not_compile_shows_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "include").mkdir()
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void wrong() { nonsense(); }\n')
    monkeypatch.setattr(module, "_KERNELS", tmp_path)
    with pytest.raises(
        KernelError, match=r'wrong.cu \{\} does not compile for sm_90a:\n[^$]*"nonsense" is undefined'
    ):
        compile_cubin(KernelSource.of("wrong.cu"), ARCH)
    assert not list(tmp_path.rglob("*.cubin"))
