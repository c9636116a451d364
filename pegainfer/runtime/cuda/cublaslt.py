"""Dense products through cuBLASLt, by ctypes: the few functions that we need, no package around them.

A plan is a product of fixed sizes; running it enqueues one call, which can be captured.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
from ctypes import byref, c_float, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any

from pegainfer.errors import ConfigError, KernelError
from pegainfer.runtime.cuda.algorithms import AlgorithmTable, Product
from pegainfer.runtime.cuda.cold_timer import ColdTimer
from pegainfer.runtime.cuda.driver import allocate, check, cuda
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.recent import Recent

__all__ = ["CublasLt", "MatmulPlan", "preload_library"]

WORKSPACE_BYTES = 64 << 20
_CANDIDATES = 16
_MAX_PLANS = 1024  # of some kilobytes; prompts come in thousands of lengths

_COMPUTE_32F = 68
_DATA_TYPE = {DType.float32: 0, DType.float16: 2, DType.bfloat16: 14}
_REAL_32F = 0
_TRANSPOSE = 1
_DESC_TRANSA = 3
_PREFERENCE_MAX_WORKSPACE = 1
_ONE, _ZERO = c_float(1.0), c_float(0.0)


Algorithm = c_uint64 * 8
"""cublasLtMatmulAlgo_t: opaque, and good to keep for the same version of the library."""


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an opaque algorithm and what it needs."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace_bytes", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


class MatmulPlan:
    """A product for `m` rows and fixed row strides (in elements). The library's first guess serves it until
    `choose` names another algorithm.
    """

    def __init__(self, lt: CublasLt, product: Product, m: int, *, x_stride: int, out_stride: int) -> None:
        self.product = product
        self.num_rows = m
        self._lt = lt
        self._beta = _ONE if product.accumulate else _ZERO
        call, kind, out_kind = lt.call, _DATA_TYPE[product.dtype], _DATA_TYPE[product.out_dtype]
        self._desc = c_void_p()
        call("cublasLtMatmulDescCreate", byref(self._desc), _COMPUTE_32F, _REAL_32F)
        # cuBLAS is column-major: our row-major out is its out^T, so the weight comes first and is transposed.
        self._set(_DESC_TRANSA, c_int32(_TRANSPOSE))
        self._a, self._b, self._c = c_void_p(), c_void_p(), c_void_p()
        for layout, element, rows, columns, stride in (
            (self._a, kind, product.k, product.n, product.k),
            (self._b, kind, product.k, m, x_stride),
            (self._c, out_kind, product.n, m, out_stride),
        ):
            call("cublasLtMatrixLayoutCreate", byref(layout), element, rows, columns, stride)
        self._chosen: ctypes.Array[c_uint64] | None = None

    def run(self, x: int, weight: int, out: int) -> None:
        """Enqueue the product of the matrices at these addresses."""
        if self._chosen is None:
            self._chosen = self.candidates(1)[0]
        self._lt.matmul(self._desc, weight, self._a, x, self._b, self._beta, out, self._c, self._chosen)

    def choose(self, algorithm: bytes) -> bool:
        """Take this algorithm, if the library agrees that it serves the product."""
        chosen, result = Algorithm.from_buffer_copy(algorithm), _Heuristic()
        status = self._lt.try_call(
            "cublasLtMatmulAlgoCheck",
            self._lt.handle,
            self._desc,
            self._a,
            self._b,
            self._c,
            self._c,
            byref(chosen),
            byref(result),
        )
        if status or result.state or result.workspace_bytes > WORKSPACE_BYTES:
            return False
        self._chosen = chosen
        return True

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._lt.call("cublasLtMatmulDescSetAttribute", self._desc, attribute, byref(value), c_size_t(size))

    def candidates(self, count: int) -> list[ctypes.Array[c_uint64]]:
        """Up to `count` algorithms, the library's favourite first; raises `KernelError` for none."""
        call, preference, found = self._lt.call, c_void_p(), c_int32()
        results = (_Heuristic * count)()
        call("cublasLtMatmulPreferenceCreate", byref(preference))
        limit = c_size_t(WORKSPACE_BYTES)
        call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _PREFERENCE_MAX_WORKSPACE,
            byref(limit),
            c_size_t(ctypes.sizeof(limit)),
        )
        call(
            "cublasLtMatmulAlgoGetHeuristic",
            self._lt.handle,
            self._desc,
            self._a,
            self._b,
            self._c,
            self._c,
            preference,
            count,
            results,
            byref(found),
        )
        call("cublasLtMatmulPreferenceDestroy", preference)
        usable = [result.algorithm for result in results[: found.value] if result.state == 0]
        if not usable:
            raise KernelError("cuBLASLt has no algorithm for a product of these sizes")
        return usable

    def __del__(self) -> None:
        for name, pointer in (
            ("cublasLtMatrixLayoutDestroy", self._a),
            ("cublasLtMatrixLayoutDestroy", self._b),
            ("cublasLtMatrixLayoutDestroy", self._c),
            ("cublasLtMatmulDescDestroy", self._desc),
        ):
            if pointer:
                self._lt.call(name, pointer)


class CublasLt:
    """A handle and its workspace, for work on one stream."""

    def __init__(self, stream: Any, *, gpu: str) -> None:
        self._library = _library()
        self._stream = c_void_p(int(stream))
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self.algorithms = AlgorithmTable(gpu, self._library.cublasLtGetVersion())
        self._plans: Recent[tuple[Product, int, int, int], MatmulPlan] = Recent(_MAX_PLANS)
        self._workspace = c_void_p(allocate(WORKSPACE_BYTES))

    def try_call(self, name: str, *arguments: Any) -> int:
        """Call a library function: its status, 0 for success."""
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a library function; raises `KernelError` with its status."""
        status = self.try_call(name, *arguments)
        if status:
            text = self._library.cublasLtGetStatusString(status)
            raise KernelError(f"{name}: {text.decode() if text else status}")

    def matmul(
        self,
        desc: c_void_p,
        a: int,
        a_layout: c_void_p,
        b: int,
        b_layout: c_void_p,
        beta: c_float,
        out: int,
        out_layout: c_void_p,
        algorithm: Any,
    ) -> None:
        """Enqueue one product with a chosen algorithm."""
        status = self._library.cublasLtMatmul(
            self.handle,
            desc,
            byref(_ONE),
            c_void_p(a),
            a_layout,
            c_void_p(b),
            b_layout,
            byref(beta),
            c_void_p(out),
            out_layout,
            c_void_p(out),
            out_layout,
            byref(algorithm),
            self._workspace,
            c_size_t(WORKSPACE_BYTES),
            self._stream,
        )
        if status:
            raise KernelError(f"cublasLtMatmul: {self._library.cublasLtGetStatusString(status).decode()}")

    def plan(self, product: Product, m: int, *, x_stride: int, out_stride: int) -> MatmulPlan:
        """A plan for these sizes, shared by all layers that have them, with the algorithm that was measured
        for them if one was.
        """

        def make() -> MatmulPlan:
            plan = MatmulPlan(self, product, m, x_stride=x_stride, out_stride=out_stride)
            known = self.algorithms.find(product, m)
            if known is not None:
                plan.choose(known)
            return plan

        return self._plans.get((product, m, x_stride, out_stride), make)

    def measure(self, plan: MatmulPlan, x: int, weight: int, out: int) -> None:
        """Time the library's candidates for a plan on these matrices, none of them in the L2 cache, and keep
        the fastest. The result is added to `out` many times if the product accumulates.
        """
        timer = ColdTimer(self._stream.value or 0)
        seconds = {}
        for algorithm in plan.candidates(_CANDIDATES):
            content = bytes(algorithm)
            if plan.choose(content):
                seconds[content] = timer.time(lambda: plan.run(x, weight, out))
        timer.close()
        best = min(seconds, key=seconds.__getitem__)
        plan.choose(best)
        self.algorithms.keep(plan.product, plan.num_rows, best)

    def close(self) -> None:
        """Free the handle and the workspace."""
        self.call("cublasLtDestroy", self.handle)
        check(cuda.cuMemFree(self._workspace.value or 0))


def preload_library() -> None:
    """Have the library, which is large, in this process before `CublasLt` looks for it. To be called in a
    thread of its own. Where no package has the library, nothing happens.

    `dlopen` is called as a foreign function, since `ctypes.CDLL` keeps the interpreter lock until it returns.
    """
    try:
        files = importlib.metadata.distribution("nvidia-cublas").files or ()
    except importlib.metadata.PackageNotFoundError:
        return
    found = next((file for file in files if file.name.startswith("libcublasLt.so")), None)
    if found is not None:
        dlopen = ctypes.CDLL(None).dlopen
        dlopen.restype, dlopen.argtypes = c_void_p, (ctypes.c_char_p, ctypes.c_int)
        dlopen(os.fsencode(found.locate()), os.RTLD_NOW)  # never closed, as a library of `ctypes` is not


@functools.cache
def _library() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        found = load_nvidia_dynamic_lib("cublasLt")
    except Exception as error:  # the finder's own error types differ between its versions
        raise ConfigError(f"cuBLASLt is missing, pip install nvidia-cublas: {error}") from None
    library = ctypes.CDLL(found.abs_path)
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    library.cublasLtGetVersion.restype = c_size_t
    library.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int32, c_uint64, c_uint64, ctypes.c_int64)
    return library
