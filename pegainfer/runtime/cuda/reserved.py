"""Device addresses that get their memory later and piece by piece: recorded launches may name them before."""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.runtime.cuda.driver import check, create_memory, cuda

__all__ = ["ReservedStorage"]


class ReservedStorage:
    """`nbytes` of addresses of one GPU; the memory goes when the last tensor that views them is gone."""

    __slots__ = ("_access", "_committed", "_granule", "_properties", "_size", "nbytes", "ptr")

    def __init__(self, ordinal: int, nbytes: int) -> None:
        self.ptr = 0  # stays 0 when there are no addresses, so that __del__ has nothing to free
        self.nbytes = nbytes
        self._committed = 0
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = cuda.CUmemAccessDesc()
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._properties.location, self._access.location):
            location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = ordinal
        kind = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self._granule = int(check(cuda.cuMemGetAllocationGranularity(self._properties, kind)))
        self._size = self._rounded(max(nbytes, 1))
        self.ptr = int(check(cuda.cuMemAddressReserve(self._size, 0, 0, 0)))

    def commit(self, nbytes: int) -> None:
        """Put memory behind the first `nbytes`, uninitialised where there was none; raises `CapacityError`
        when there is not enough.
        """
        wanted = self._rounded(min(nbytes, self.nbytes))
        size = wanted - self._committed
        if size <= 0:
            return
        start, memory = self.ptr + self._committed, create_memory(size, self._properties)
        try:
            check(cuda.cuMemMap(start, size, 0, memory, 0))
            self._committed = wanted
            check(cuda.cuMemSetAccess(start, size, [self._access], 1))
        finally:
            check(cuda.cuMemRelease(memory))  # it lasts as long as it is mapped

    def host_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Refused: the host cannot address device memory."""
        raise TypeError("device memory is not host-addressable; use Device.to_numpy")

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self._granule) * self._granule

    def __del__(self) -> None:
        if not self.ptr:
            return
        if self._committed:
            cuda.cuCtxSynchronize()  # unlike freeing, unmapping does not wait for who still uses it
            cuda.cuMemUnmap(self.ptr, self._committed)
        cuda.cuMemAddressFree(self.ptr, self._size)
