"""What control groups and processor flags allow, read from made-up files."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.errors import ConfigError
from pegainfer.runtime.cpu.isa import LEVELS, choose_level, cpu_flags, supported_levels
from pegainfer.runtime.cpu.limits import cpu_quota, default_num_threads, memory_info


def make_proc(tmp_path: Path, *, version: int, group: str = "/a/b") -> tuple[Path, Path]:
    """A `/proc` whose process is in `group`, and the mount point of the control groups."""
    proc, mount = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (mount / group.lstrip("/")).mkdir(parents=True)
    controllers = "" if version == 2 else "cpu,memory"
    kind, options = ("cgroup2", "rw") if version == 2 else ("cgroup", "rw,cpu,memory")
    (proc / "self" / "cgroup").write_text(f"0:{controllers}:{group}\n")
    (proc / "self" / "mountinfo").write_text(f"30 20 0:26 / {mount} rw - {kind} cgroup {options}\n")
    (proc / "meminfo").write_text("MemTotal:       8000000 kB\nMemAvailable:   6000000 kB\n")
    return proc, mount


def test_no_limit(tmp_path: Path) -> None:
    proc, _ = make_proc(tmp_path, version=2)
    assert cpu_quota(proc) is None
    assert memory_info(proc).total == 8_000_000 * 1024


@pytest.mark.parametrize(("text", "quota"), [("150000 100000", 1.5), ("max 100000", None), ("garbage", None)])
def test_quota_of_version_2(tmp_path: Path, text: str, quota: float | None) -> None:
    proc, mount = make_proc(tmp_path, version=2)
    (mount / "a" / "b" / "cpu.max").write_text(text)
    assert cpu_quota(proc) == quota


def test_the_tightest_parent_counts(tmp_path: Path) -> None:
    proc, mount = make_proc(tmp_path, version=2)
    (mount / "a" / "cpu.max").write_text("100000 100000")
    (mount / "a" / "b" / "cpu.max").write_text("300000 100000")
    assert cpu_quota(proc) == 1.0


def test_quota_of_version_1(tmp_path: Path) -> None:
    proc, mount = make_proc(tmp_path, version=1)
    (mount / "a" / "b" / "cpu.cfs_quota_us").write_text("250000")
    (mount / "a" / "b" / "cpu.cfs_period_us").write_text("100000")
    assert cpu_quota(proc) == 2.5


def test_memory_within_a_group_counts_its_cache_as_free(tmp_path: Path) -> None:
    proc, mount = make_proc(tmp_path, version=2)
    folder = mount / "a" / "b"
    (folder / "memory.max").write_text(str(1 << 30))
    (folder / "memory.current").write_text(str(700 << 20))
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {200 << 20}\n")
    info = memory_info(proc)
    assert (info.total, info.available) == (1 << 30, (1 << 30) - (500 << 20))


def test_there_is_always_a_thread() -> None:
    assert default_num_threads() >= 1


def test_levels_follow_the_flags(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 fma f16c bmi2 popcnt\n\nprocessor : 1\n")
    flags = cpu_flags(cpuinfo)
    assert supported_levels(flags) == ("avx2", "portable")
    assert choose_level(flags, None) == "avx2"
    assert choose_level(flags, "portable") == "portable"
    with pytest.raises(ConfigError, match=r"PEGAINFER_CPU_ISA=avx512 .* avx2, portable"):
        choose_level(flags, "avx512")
    assert supported_levels(frozenset().union(*LEVELS.values())) == tuple(LEVELS)
