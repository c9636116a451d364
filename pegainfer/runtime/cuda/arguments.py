"""Kernel arguments as the driver takes them: values in 8-byte slots, and a table of the slots' addresses.

A signature has one letter an argument: `p` pointer or 64-bit integer, `i` 32-bit integer, `f` float32, `m` a
tensor map, which is given as its address in host memory. Needs no driver.
"""

from __future__ import annotations

import ctypes
import struct

from pegainfer.errors import KernelError

__all__ = ["Arguments"]

_SLOT = 8
_LAYOUT = {"p": "q", "i": "i4x", "f": "f4x", "m": "q"}


class Arguments:
    """The arguments of the kernel `name`, packed anew before each launch."""

    __slots__ = ("_in_place", "_name", "_pack_into", "_pointers", "_signature", "address", "values")

    def __init__(self, name: str, signature: str) -> None:
        self._name = name
        self._signature = signature
        self._in_place = [index for index, letter in enumerate(signature) if letter == "m"]
        # One call for all of them: this is on the path of every launch.
        self._pack_into = struct.Struct("<" + "".join(_LAYOUT[letter] for letter in signature)).pack_into
        self.values = bytearray(_SLOT * len(signature))
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.values)) if signature else 0
        self._pointers = (ctypes.c_void_p * len(signature))(
            *(base + _SLOT * index for index in range(len(signature)))
        )
        self.address = ctypes.addressof(self._pointers)
        """Of the table of addresses; the same at every launch."""

    def pack(self, arguments: tuple[int | float, ...]) -> None:
        """Write the values; raises `KernelError` for another number of them, or one that its slot cannot
        hold.
        """
        try:
            self._pack_into(self.values, 0, *arguments)
        except (struct.error, OverflowError) as error:
            raise KernelError(self._complaint(arguments, error)) from None
        for index in self._in_place:
            self._pointers[index] = int(arguments[index])

    def _complaint(self, arguments: tuple[int | float, ...], error: Exception) -> str:
        """Which of the arguments is wrong."""
        if len(arguments) != len(self._signature):
            return f"{self._name} takes {len(self._signature)} arguments, got {len(arguments)}"
        for index, (letter, argument) in enumerate(zip(self._signature, arguments, strict=True)):
            try:
                struct.pack("<" + _LAYOUT[letter], argument)
            except (struct.error, OverflowError) as own:
                return f"argument {index} of {self._name} cannot be {argument!r}: {own}"
        return f"the arguments of {self._name} cannot be {arguments!r}: {error}"
