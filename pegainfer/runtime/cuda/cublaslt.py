"""Dense products through cuBLASLt, by ctypes: the few functions that we need, no package around them.

A plan is a product of fixed sizes whose algorithm has been chosen; running it enqueues one call, which can be
captured.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref, c_float, c_int32, c_size_t, c_uint64, c_void_p
from typing import Any

from pegainfer.errors import ConfigError, KernelError
from pegainfer.runtime.cuda.driver import allocate, check, cuda
from pegainfer.runtime.dtypes import DType

__all__ = ["CublasLt", "MatmulPlan"]

WORKSPACE_BYTES = 64 << 20

_COMPUTE_32F = 68
_DATA_TYPE = {DType.float32: 0, DType.float16: 2, DType.bfloat16: 14}
_REAL_32F = 0
_TRANSPOSE = 1
_DESC_TRANSA = 3
_PREFERENCE_MAX_WORKSPACE = 1
_ONE, _ZERO = c_float(1.0), c_float(0.0)


class _Heuristic(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an opaque algorithm and what it needs."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int32),
        ("waves", c_float),
        ("reserved", c_int32 * 4),
    )


class MatmulPlan:
    """`out[m, n] = x[m, k] @ weight[n, k].T (+ out)` for fixed sizes and row strides (in elements)."""

    def __init__(
        self,
        lt: CublasLt,
        dtype: DType,
        *,
        m: int,
        n: int,
        k: int,
        x_stride: int,
        out_stride: int,
        accumulate: bool,
        out_dtype: DType,
        candidates: int = 1,
    ) -> None:
        self._lt = lt
        self._beta = _ONE if accumulate else _ZERO
        call, kind, out_kind = lt.call, _DATA_TYPE[dtype], _DATA_TYPE[out_dtype]
        self._desc = c_void_p()
        call("cublasLtMatmulDescCreate", byref(self._desc), _COMPUTE_32F, _REAL_32F)
        # cuBLAS is column-major: our row-major out is its out^T, so the weight comes first and is transposed.
        self._set(_DESC_TRANSA, c_int32(_TRANSPOSE))
        self._a, self._b, self._c = c_void_p(), c_void_p(), c_void_p()
        for layout, element, rows, columns, stride in (
            (self._a, kind, k, n, k),
            (self._b, kind, k, m, x_stride),
            (self._c, out_kind, n, m, out_stride),
        ):
            call("cublasLtMatrixLayoutCreate", byref(layout), element, rows, columns, stride)
        self.algorithms = self._heuristics(candidates)
        self.chosen = self.algorithms[0]

    def run(self, x: int, weight: int, out: int) -> None:
        """Enqueue the product of the matrices at these addresses."""
        self._lt.matmul(self._desc, weight, self._a, x, self._b, self._beta, out, self._c, self.chosen)

    def _set(self, attribute: int, value: Any) -> None:
        size = ctypes.sizeof(value)
        self._lt.call("cublasLtMatmulDescSetAttribute", self._desc, attribute, byref(value), c_size_t(size))

    def _heuristics(self, count: int) -> list[_Heuristic]:
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
        usable = [result for result in results[: found.value] if result.state == 0]
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

    def __init__(self, stream: Any) -> None:
        self._library = _library()
        self._stream = c_void_p(int(stream))
        self.handle = c_void_p()
        self.call("cublasLtCreate", byref(self.handle))
        self._plans: dict[tuple[Any, ...], MatmulPlan] = {}
        self._workspace = c_void_p(allocate(WORKSPACE_BYTES))

    def call(self, name: str, *arguments: Any) -> None:
        """Call a library function; raises `KernelError` with its status."""
        status = getattr(self._library, name)(*arguments)
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
        heuristic: _Heuristic,
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
            byref(heuristic.algorithm),
            self._workspace,
            c_size_t(WORKSPACE_BYTES),
            self._stream,
        )
        if status:
            raise KernelError(f"cublasLtMatmul: {self._library.cublasLtGetStatusString(status).decode()}")

    def plan(self, dtype: DType, **sizes: Any) -> MatmulPlan:
        """A plan for these sizes, shared by all products that have them; see `MatmulPlan`."""
        key = (dtype, *sorted(sizes.items()))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = MatmulPlan(self, dtype, **sizes)
        return plan

    def close(self) -> None:
        """Free the handle and the workspace."""
        self.call("cublasLtDestroy", self.handle)
        check(cuda.cuMemFree(self._workspace.value or 0))


@functools.cache
def _library() -> ctypes.CDLL:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    try:
        found = load_nvidia_dynamic_lib("cublasLt")
    except Exception as error:  # the finder's own error types differ between its versions
        raise ConfigError(f"cuBLASLt is missing, pip install nvidia-cublas: {error}") from None
    library = ctypes.CDLL(found.abs_path)
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    library.cublasLtMatrixLayoutCreate.argtypes = (c_void_p, c_int32, c_uint64, c_uint64, ctypes.c_int64)
    return library
