"""Kernel arguments as the driver takes them: values in 8-byte slots, and a table of the slots' addresses.

A signature has one letter an argument: `p` pointer or 64-bit integer, `i` 32-bit integer, `f` float32. Needs
no driver.
"""

from __future__ import annotations

import ctypes
import struct

from pegainfer.errors import KernelError

__all__ = ["Arguments"]

_SLOT = 8
_PACK = {"p": struct.Struct("<q"), "i": struct.Struct("<i"), "f": struct.Struct("<f")}


class Arguments:
    """The arguments of the kernel `name`, packed anew before each launch."""

    __slots__ = ("_name", "_packers", "_pointers", "address", "values")

    def __init__(self, name: str, signature: str) -> None:
        self._name = name
        self._packers = [_PACK[letter] for letter in signature]
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
        if len(arguments) != len(self._packers):
            raise KernelError(f"{self._name} takes {len(self._packers)} arguments, got {len(arguments)}")
        values, offset = self.values, 0
        try:
            for packer, argument in zip(self._packers, arguments, strict=True):
                packer.pack_into(values, offset, argument)
                offset += _SLOT
        except (struct.error, OverflowError) as error:
            index = offset // _SLOT
            raise KernelError(
                f"argument {index} of {self._name} cannot be {arguments[index]!r}: {error}"
            ) from None
