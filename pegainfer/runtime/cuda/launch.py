"""The one way a kernel is launched: packed arguments, a launch configuration, programmatic dependent launch.

`Arguments` packs them. The driver copies them during the call, so one buffer a kernel is enough.
"""

from __future__ import annotations

from typing import Any

from pegainfer.runtime.cuda.arguments import Arguments
from pegainfer.runtime.cuda.driver import check, cuda

__all__ = ["Kernel"]

_UNRAISED_SHARED = 32 * 1024  # of 48 KB without asking, the rest is left to static shared memory
CARVEOUT = 100  # per cent of the memory that is shared


class Kernel:
    """A function of a loaded module. `shared_bytes` is its dynamic shared memory, the same at every launch;
    so many neighbouring blocks as `cluster` says run together.

    With `dependent` the kernel may start before its predecessor on the stream has ended; it must execute
    `griddepcontrol.wait` before it touches anything that earlier work writes or reads.
    """

    def __init__(
        self,
        module: Any,
        name: str,
        *,
        signature: str,
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = True,
    ) -> None:
        self.name = name
        self._function = check(cuda.cuModuleGetFunction(module, name.encode()))
        if shared_bytes > _UNRAISED_SHARED:
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cuda.cuFuncSetAttribute(self._function, attribute, shared_bytes))
        # The split of L1 and shared memory only changes when a multiprocessor is empty. With one split for
        # all, the blocks of the next kernel can move in beside those of this one.
        carveout = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        check(cuda.cuFuncSetAttribute(self._function, carveout, CARVEOUT))
        self._arguments = Arguments(name, signature)
        self._pack, self._params = self._arguments.pack, self._arguments.address
        self._cluster = cluster
        self._config = cuda.CUlaunchConfig()
        self._config.sharedMemBytes = shared_bytes
        self._config.gridDimZ = self._config.blockDimY = self._config.blockDimZ = 1
        attributes = []
        kinds = cuda.CUlaunchAttributeID
        if dependent:
            value = cuda.CUlaunchAttributeValue()
            value.programmaticStreamSerializationAllowed = 1
            kind = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes.append(_attribute(kind, value))
        if cluster > 1:
            value = cuda.CUlaunchAttributeValue()
            value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = cluster, 1, 1
            attributes.append(_attribute(kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
        if attributes:
            self._config.attrs = attributes
            self._config.numAttrs = len(attributes)

    def max_clusters(self, block: int) -> int:
        """How many clusters can run at once, of blocks of so many threads. Multiprocessors that may form one
        lie together, and how many lie together differs between GPUs of one kind.
        """
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = self._cluster, 1, 1
        self._config.blockDimX = block
        return int(check(cuda.cuOccupancyMaxActiveClusters(self._function, self._config)))

    def launch(self, stream: Any, grid: tuple[int, ...], block: int, *arguments: int | float) -> None:
        """Enqueue on `stream`: `grid` of up to three dimensions, `block` threads a block. Raises
        `KernelError` for arguments that do not fit the signature.
        """
        self._pack(arguments)
        config = self._config
        config.gridDimX = grid[0]
        config.gridDimY = grid[1] if len(grid) > 1 else 1
        config.gridDimZ = grid[2] if len(grid) > 2 else 1
        config.blockDimX = block
        config.hStream = stream
        status = cuda.cuLaunchKernelEx(config, self._function, self._params, 0)[0]
        if status != cuda.CUresult.CUDA_SUCCESS:
            check((status,))


def _attribute(kind: Any, value: Any) -> Any:
    attribute = cuda.CUlaunchAttribute()
    attribute.id = kind
    attribute.value = value
    return attribute
