"""`CudaDevice`: one GPU's context, stream, memory, kernels and graphs."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from pegainfer.errors import KernelError
from pegainfer.runtime.cuda.cubins import CubinLoader
from pegainfer.runtime.cuda.download import CudaDownload, LandingPool
from pegainfer.runtime.cuda.driver import allocate, allocate_pinned, attribute, check, cuda, initialize
from pegainfer.runtime.cuda.launch import Kernel
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.cuda.tensor_map import make_tensor_map
from pegainfer.runtime.cuda.upload import UploadRing
from pegainfer.runtime.device import DeviceKind, MemoryInfo
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.recent import Recent
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.algorithms import Product
    from pegainfer.runtime.cuda.cublaslt import CublasLt

__all__ = ["CudaDevice", "CudaGraph", "CudaStream", "DeviceStorage", "PinnedStorage", "make_cuda_device"]

_ARCHITECTURE_SPECIFIC = {(9, 0), (10, 0), (12, 0)}
"""Capabilities whose kernels use instructions of that one architecture (`sm_90a`: wgmma, setmaxnreg)."""

_MAX_TENSOR_MAPS = 4096  # more than the weights and caches of a large model have, and its small steps


class DeviceStorage:
    """Device memory; freed when the last tensor that views it is gone."""

    __slots__ = ("nbytes", "ptr")

    def __init__(self, nbytes: int) -> None:
        self.ptr = 0  # stays 0 when the allocation fails, so that __del__ has nothing to free
        self.ptr = allocate(nbytes)
        self.nbytes = nbytes

    def host_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Refused: the host cannot address device memory."""
        raise TypeError("device memory is not host-addressable; use Device.to_numpy")

    def __del__(self) -> None:
        if self.ptr:
            cuda.cuMemFree(self.ptr)


class PinnedStorage:
    """Page-locked host memory that the GPU copies from and to without staging."""

    __slots__ = ("_array", "nbytes", "ptr")

    def __init__(self, nbytes: int) -> None:
        self.ptr = 0
        self.ptr = allocate_pinned(nbytes)
        self.nbytes = nbytes
        buffer = (ctypes.c_uint8 * max(nbytes, 1)).from_address(self.ptr)
        self._array: np.ndarray[Any, np.dtype[np.uint8]] = np.ctypeslib.as_array(buffer)

    def host_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes, writable, without a copy."""
        return self._array

    def __del__(self) -> None:
        if self.ptr:
            cuda.cuMemFreeHost(self.ptr)


class CudaGraph:
    """An instantiated graph."""

    def __init__(self, stream: CudaStream, graph: Any) -> None:
        self._stream = stream
        self._executable = check(cuda.cuGraphInstantiate(graph, 0))
        check(cuda.cuGraphDestroy(graph))
        check(cuda.cuGraphUpload(self._executable, stream.handle))

    def replay(self) -> None:
        """Enqueue the recorded launches as one."""
        check(cuda.cuGraphLaunch(self._executable, self._stream.handle))

    def __del__(self) -> None:
        if hasattr(self, "_executable"):
            cuda.cuGraphExecDestroy(self._executable)


class CudaStream:
    """The stream on which all of a rank's work is ordered."""

    def __init__(self) -> None:
        self.handle = check(cuda.cuStreamCreate(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING.value))

    def synchronize(self) -> None:
        """Wait for everything that was enqueued; raises `KernelError` with the driver's text when it
        failed.
        """
        check(cuda.cuStreamSynchronize(self.handle))

    def begin_capture(self) -> None:
        """Record launches from now on."""
        check(cuda.cuStreamBeginCapture(self.handle, cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED))

    def end_capture(self) -> CudaGraph:
        """Stop recording and instantiate what was recorded."""
        return CudaGraph(self, check(cuda.cuStreamEndCapture(self.handle)))

    def copy_to_device(self, target: Tensor, source: Tensor) -> None:
        """Enqueue a copy of a pinned tensor's bytes into a device tensor of the same size."""
        check(cuda.cuMemcpyHtoDAsync(target.data_ptr, source.data_ptr, source.nbytes, self.handle))


class PinnedMirror:
    """A `Mirror` whose upload is one asynchronous copy."""

    def __init__(self, device: CudaDevice, nbytes: int, copies: int) -> None:
        self._stream = device.stream
        self._pinned = [device.pinned((nbytes,), DType.uint8) for _ in range(copies)]
        self.hosts: list[np.ndarray[Any, np.dtype[np.uint8]]] = [memory.numpy() for memory in self._pinned]
        for host in self.hosts:
            host[:] = 0
        self.tensor = device.zeros((nbytes,), DType.uint8)

    def upload(self, nbytes: int, source: int) -> None:
        """Enqueue the copy of the first bytes. They must not change before it has happened."""
        pinned = self._pinned[source]
        self._stream.copy_to_device(self.tensor.slice(0, 0, nbytes), pinned.slice(0, 0, nbytes))


class CudaDevice:
    """One GPU. All calls must come from the thread that made it (or one that calls `bind_thread`)."""

    kind = DeviceKind.cuda
    is_asynchronous = True

    def __init__(self, ordinal: int = 0) -> None:
        self._device = initialize(ordinal)
        self._context = check(cuda.cuDevicePrimaryCtxRetain(self._device))
        self.bind_thread()
        self.ordinal = ordinal
        major, minor = (attribute(self._device, f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self.capability = (major, minor)
        self.num_multiprocessors = attribute(self._device, "MULTIPROCESSOR_COUNT")
        self.max_shared_bytes = attribute(self._device, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.stream = CudaStream()
        self.cubins = CubinLoader(self.arch)
        self._modules: dict[KernelSource, Any] = {}
        self._workspaces: dict[str, Tensor] = {}
        self._tensor_maps: Recent[tuple[Any, ...], Any] = Recent(_MAX_TENSOR_MAPS)
        self._landings = LandingPool(self)
        self._uploads: UploadRing | None = None
        self.products: set[Product] = set()
        """Products that cuBLASLt will be asked for, whose algorithms are worth measuring."""

    @functools.cached_property
    def name(self) -> str:
        """The GPU's name as the driver gives it."""
        raw: bytes = check(cuda.cuDeviceGetName(128, self._device))
        return raw.split(b"\0")[0].decode()

    @property
    def arch(self) -> str:
        """`sm_90a` for a Hopper GPU, `sm_89` for Ada."""
        major, minor = self.capability
        return f"sm_{major}{minor}" + ("a" if self.capability in _ARCHITECTURE_SPECIFIC else "")

    def bind_thread(self) -> None:
        """Make this device's context current in the calling thread."""
        check(cuda.cuCtxSetCurrent(self._context))

    def activation_dtype(self, dtype: DType) -> DType:
        """Activations have the model's own type."""
        return dtype

    def memory_info(self) -> MemoryInfo:
        """Bytes of the GPU: all, and free now."""
        free, total = check(cuda.cuMemGetInfo())
        return MemoryInfo(total=int(total), available=int(free))

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised device memory."""
        return Tensor(DeviceStorage(math.prod(shape) * dtype.itemsize), dtype, shape)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Zeroed device memory."""
        tensor = self.empty(shape, dtype)
        if tensor.nbytes:
            check(cuda.cuMemsetD8Async(tensor.data_ptr, 0, tensor.nbytes, self.stream.handle))
        return tensor

    def pinned(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised page-locked host memory."""
        return Tensor(PinnedStorage(math.prod(shape) * dtype.itemsize), dtype, shape)

    def mirror(self, nbytes: int, *, copies: int = 1) -> PinnedMirror:
        """Zeroed page-locked memory and its copy on the device."""
        return PinnedMirror(self, nbytes, copies)

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A device copy of an array; returns when the array may be changed again, but while `loading`."""
        host = np.ascontiguousarray(array)
        tensor = self.empty(host.shape, DType.of(host.dtype))
        if tensor.nbytes:
            self.upload(host.reshape(-1).view(np.uint8), tensor)
        return tensor

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Let `upload` send arrays on by threads until the block ends. Meanwhile the library is loaded that
        products will need right after it.
        """
        if self.products:  # not earlier: imports of modules that are libraries would wait for the loader, too
            from pegainfer.runtime.cuda.cublaslt import preload_library

            threading.Thread(target=preload_library, name="preload", daemon=True).start()
        ring = self._uploads = UploadRing(self)
        try:
            yield
        finally:
            self._uploads = None
            ring.close()

    def upload(self, array: np.ndarray[Any, np.dtype[np.uint8]], target: Tensor) -> None:
        """Copy a flat array into device memory of the same size. It must not change while `loading`."""
        if self._uploads is not None:
            self._uploads.send(array, target)
            return
        check(cuda.cuMemcpyHtoDAsync(target.data_ptr, array.ctypes.data, array.nbytes, self.stream.handle))
        self.stream.synchronize()

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A host copy of a contiguous tensor, after everything that was enqueued."""
        if not tensor.is_contiguous:
            raise KernelError("only a contiguous tensor can be copied to the host")
        host: np.ndarray[Any, Any] = np.empty(tensor.shape, tensor.dtype.numpy)
        if tensor.nbytes:
            check(
                cuda.cuMemcpyDtoHAsync(host.ctypes.data, tensor.data_ptr, tensor.nbytes, self.stream.handle)
            )
        self.stream.synchronize()
        return host

    def download(self, tensors: Sequence[Tensor]) -> CudaDownload:
        """Enqueue copies of contiguous tensors into page-locked memory."""
        return CudaDownload(self._landings, self.stream.handle, tensors)

    def kernel(
        self,
        source: KernelSource,
        name: str,
        *,
        signature: str,
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = True,
    ) -> Kernel:
        """The function `name` of `source`, compiled (or taken from the cache) and loaded; see `Kernel`."""
        loaded = self._modules.get(source)
        if loaded is None:
            loaded = self._modules[source] = check(cuda.cuModuleLoadData(self.cubins.load(source)))
        return Kernel(
            loaded,
            name,
            signature=signature,
            shared_bytes=shared_bytes,
            cluster=cluster,
            dependent=dependent and self.capability >= (9, 0),
        )

    def tensor_map(self, tensor: Tensor, dtype: DType, **layout: Sequence[int]) -> int:
        """The address of a tensor map over a tensor's memory (see `make_tensor_map`), made once for the same
        sizes and kept for the next thousands.
        """
        key = (tensor.data_ptr, dtype, *map(tuple, layout.values()))
        found = self._tensor_maps.get(key, lambda: make_tensor_map(tensor.data_ptr, dtype, **layout))
        return int(found.getPtr())

    def workspace(self, name: str, nbytes: int) -> Tensor:
        """Zeroed memory that the ops which name it share: they run one after the other on the stream.

        Whoever holds the tensor keeps its address; asking for more later makes a new one.
        """
        held = self._workspaces.get(name)
        if held is None or held.nbytes < nbytes:
            held = self._workspaces[name] = self.zeros((nbytes,), DType.uint8)
        return held

    @functools.cached_property
    def cublaslt(self) -> CublasLt:
        """The cuBLASLt handle of this device's stream, opened when it is first needed."""
        from pegainfer.runtime.cuda.cublaslt import CublasLt

        return CublasLt(self.stream.handle, gpu=self.name)

    def tune(self, forward: Callable[[int], object], limit: int) -> int:
        """Measure which cuBLASLt algorithms are fastest, where no file tells."""
        if not self.products:
            return 0
        return self.cublaslt.algorithms.measure(self.products, forward, limit)

    def close(self) -> None:
        """Wait for the stream and unload every kernel. Tensors free their own memory."""
        self.stream.synchronize()
        self._landings.close()
        if "cublaslt" in vars(self):
            self.cublaslt.close()
        for loaded in self._modules.values():
            cuda.cuModuleUnload(loaded)
        self._modules.clear()


def make_cuda_device(ordinal: int = 0) -> CudaDevice:
    """The GPU `ordinal`; raises `ConfigError` with one sentence when it cannot be used."""
    return CudaDevice(ordinal)
