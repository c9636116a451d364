"""The compiled kernels of one instruction set level: finding, loading, running programs."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from array import array
from functools import cache
from pathlib import Path

from pegainfer.errors import KernelError

__all__ = ["Library", "NativePool", "built_levels", "load_library"]

_FOLDER = Path(__file__).resolve().parents[2] / "_native"
_ERROR_BYTES = 512


def built_levels(folder: Path = _FOLDER) -> frozenset[str]:
    """The levels that libraries were compiled for."""
    prefix, suffix = "libpegainfer_cpu_", ".so"
    return frozenset(path.name[len(prefix) : -len(suffix)] for path in folder.glob(f"{prefix}*{suffix}"))


@cache
def load_library(level: str) -> Library:
    """The library of a level, loaded once per process; raises `KernelError` when it cannot be."""
    return Library(level, _FOLDER / f"libpegainfer_cpu_{level}.so")


class Library:
    """A loaded library. Kernels are known by the addresses of their functions."""

    def __init__(self, level: str, path: Path) -> None:
        self.level = level
        try:
            self._library = ctypes.CDLL(str(path))
            self.pool_create = self._library.pega_pool_create
            self.pool_destroy = self._library.pega_pool_destroy
            self.run = self._library.pega_run
        except (OSError, AttributeError) as problem:
            raise KernelError(
                f"{path} cannot be used ({problem}); run `python -m pegainfer.kernels.build`"
            ) from None
        self.pool_create.argtypes = [ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t]
        self.pool_create.restype = ctypes.c_void_p
        self.pool_destroy.argtypes = [ctypes.c_void_p]
        self.pool_destroy.restype = None
        self.run.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_char_p,
            ctypes.c_size_t,
        ]
        self.run.restype = ctypes.c_int32
        self._addresses: dict[str, int] = {}

    def address(self, function: str) -> int:
        """Address of an exported function; raises `KernelError` when the library has none of that name."""
        if function not in self._addresses:
            try:
                pointer = ctypes.cast(getattr(self._library, function), ctypes.c_void_p)
            except AttributeError:
                raise KernelError(
                    f"the compiled {self.level} kernels lack {function}; "
                    "run `python -m pegainfer.kernels.build`"
                ) from None
            assert pointer.value is not None
            self._addresses[function] = pointer.value
        return self._addresses[function]


class NativePool:
    """Threads that run programs of a library's kernels. One program runs at a time."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.num_threads = num_threads
        self._error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._run = library.run
        handle = library.pool_create(num_threads, self._error, _ERROR_BYTES)
        if not handle:
            raise KernelError(f"{num_threads} threads could not be started: {self._error_text()}")
        self._handle: int = handle
        self._process = os.getpid()
        self._lock = threading.Lock()
        # Not at exit: the system ends the threads, and kernels may still be running in one of them.
        self._destroy = weakref.finalize(self, library.pool_destroy, handle)
        self._destroy.atexit = False

    def run(self, words: array[int], num_nodes: int) -> None:
        """Run a program (for each node: function address, number of arguments, arguments) to its end; raises
        `KernelError` when a kernel failed.
        """
        with self._lock:
            self._check()
            if self._run(self._handle, words.buffer_info()[0], num_nodes, self._error, _ERROR_BYTES):
                raise KernelError(f"a CPU kernel failed: {self._error_text()}")

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            if os.getpid() == self._process:
                self._destroy()
            else:
                self._destroy.detach()

    def _check(self) -> None:
        if not self._destroy.alive:
            raise KernelError("the CPU device was closed; make a new one")
        if os.getpid() != self._process:
            raise KernelError("a CPU device does not survive a fork; start processes with the spawn method")

    def _error_text(self) -> str:
        return self._error.value.decode(errors="replace")
