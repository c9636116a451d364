"""The CPU's stream: a list of commands that `synchronize` runs, and recorded lists that can be run again.

Consecutive launches of compiled kernels are one program, which takes one native call. Addresses are all that
is kept of a launch's tensors: they must live until it has run.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pegainfer.errors import KernelError
from pegainfer.runtime.cpu.library import NativePool

__all__ = ["CpuGraph", "CpuStream", "float_bits"]


def float_bits(value: float) -> int:
    """A real number as an argument of a kernel."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@dataclass(slots=True)
class _Program:
    """Launches in the format that the native executor reads."""

    words: array[int]
    num_nodes: int = 0


_Command = _Program | Callable[[], None]


class CpuGraph:
    """Recorded commands."""

    __slots__ = ("_commands", "_stream")

    def __init__(self, stream: CpuStream, commands: tuple[_Command, ...]) -> None:
        self._stream = stream
        self._commands = commands

    def replay(self) -> None:
        """Enqueue everything that was recorded."""
        self._stream.enqueue(self._commands)


class CpuStream:
    """An ordered queue of work. `pool` is None without compiled kernels; then only `call` works."""

    def __init__(self, pool: NativePool | None) -> None:
        self._pool = pool
        self._commands: list[_Command] = []
        self._waiting: list[_Command] | None = None  # commands from before the capture, while one is going on
        self._open: _Program | None = None  # the last command, while launches can be added to it

    def launch(self, function_address: int, arguments: tuple[int, ...]) -> None:
        """Enqueue a compiled kernel. Arguments are 64-bit words: addresses, integers, `float_bits`."""
        program = self._open
        if program is None:
            self._open = program = _Program(array("q"))
            self._commands.append(program)
        program.words.extend((function_address, len(arguments), *arguments))
        program.num_nodes += 1

    def call(self, function: Callable[[], None]) -> None:
        """Enqueue a Python function."""
        self._open = None
        self._commands.append(function)

    def enqueue(self, commands: tuple[_Command, ...]) -> None:
        """Enqueue recorded commands."""
        self._open = None
        self._commands.extend(commands)

    def synchronize(self) -> None:
        """Run everything that was enqueued. When a command fails the rest is dropped; raises `KernelError`
        for a kernel's failure.
        """
        if self._waiting is not None:
            raise KernelError("a stream cannot be synchronized while it is captured")
        commands, self._commands, self._open = self._commands, [], None
        for command in commands:
            if not isinstance(command, _Program):
                command()
            elif self._pool is None:
                raise KernelError("there are no compiled CPU kernels to launch")
            else:
                self._pool.run(command.words, command.num_nodes)

    def begin_capture(self) -> None:
        """Record commands from now on instead of running them."""
        if self._waiting is not None:
            raise KernelError("a capture is going on already")
        self._waiting, self._commands, self._open = self._commands, [], None

    def end_capture(self) -> CpuGraph:
        """Stop recording and return what was recorded."""
        if self._waiting is None:
            raise KernelError("no capture is going on")
        graph = CpuGraph(self, tuple(self._commands))
        self._commands, self._waiting, self._open = self._waiting, None, None
        return graph
