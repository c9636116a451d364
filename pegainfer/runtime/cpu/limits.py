"""What this process may use of the machine: processors and memory, as affinity and control groups allow."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from pegainfer.runtime.device import MemoryInfo

__all__ = ["cpu_quota", "default_num_threads", "memory_info"]

_PROC = Path("/proc")
_TOPOLOGY = Path("/sys/devices/system/cpu")


def default_num_threads() -> int:
    """Threads that can really run at once: the cores of the affinity mask, within the CPU quota."""
    cores = _cores(os.sched_getaffinity(0), _TOPOLOGY)
    quota = cpu_quota()
    # Rounded down: a thread too many has all of them stopped at the end of every period.
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cpu_quota(proc: Path = _PROC) -> float | None:
    """Processors' worth of time that the control groups of this process allow; None without a limit."""
    limits = []
    for folder in _cgroup_folders(proc, ""):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            limits.append(int(words[0]) / int(words[1]))
    for folder in _cgroup_folders(proc, "cpu"):
        quota, period = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota is not None and period and quota > 0:
            limits.append(quota / period)
    return min(limits, default=None)


def memory_info(proc: Path = _PROC) -> MemoryInfo:
    """Memory of the machine or of the tightest control group, and what may still be taken of it."""
    fields = dict(line.split(":", 1) for line in _read(proc / "meminfo").splitlines() if ":" in line)
    total, available = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    for folder in _cgroup_folders(proc, ""):
        limit, used = _read_int(folder / "memory.max"), _read_int(folder / "memory.current")
        total, available = _tighten(total, available, limit, used, _stat(folder, "inactive_file"))
    for folder in _cgroup_folders(proc, "memory"):
        limit, used = _read_int(folder / "memory.limit_in_bytes"), _read_int(folder / "memory.usage_in_bytes")
        total, available = _tighten(total, available, limit, used, _stat(folder, "total_inactive_file"))
    return MemoryInfo(total=total, available=available)


def _tighten(total: int, available: int, limit: int | None, used: int | None, cached: int) -> tuple[int, int]:
    """Both numbers within one control group's limit; its page cache counts as free."""
    if limit is None or used is None or limit >= total:
        return total, available
    return limit, max(0, min(available, limit - used + cached))


def _cores(processors: set[int], topology: Path) -> int:
    """Number of different cores among logical processors (a core may appear as several)."""
    names = set()
    for processor in processors:
        siblings = _read(topology / f"cpu{processor}" / "topology" / "thread_siblings_list")
        names.add(siblings.strip() or str(processor))
    return len(names)


def _cgroup_folders(proc: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and its parents in the hierarchy of a version 1 controller, or
    in version 2's (`""`).
    """
    path = None
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controller in controllers.split(","):
            path = group
    if path is None:
        return
    for line in _read(proc / "self" / "mountinfo").splitlines():
        fields, _, source = line.partition(" - ")
        root, mount_point = fields.split()[3:5]
        kind, _, options = source.split(" ", 2)
        if kind != ("cgroup" if controller else "cgroup2"):
            continue
        if controller and controller not in options.split(","):
            continue
        base = Path(mount_point)
        # Inside a container the mount may show only our own group, as its root.
        relative = os.path.relpath(path, root)
        folder = base if relative.startswith("..") else base / relative
        while True:
            yield folder
            if folder == base:
                return
            folder = folder.parent


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    """The number in a file; None when there is none, or the word `max`."""
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
