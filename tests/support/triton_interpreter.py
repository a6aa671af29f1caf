"""Triton's interpreter as the tests run it: with bfloat16, and faster.

Its own arithmetic takes the bits of a bfloat16 number for an integer. Here such a number keeps its 2 bytes in memory,
and is in a program a float32 that bfloat16 holds exactly: a load widens, and each operation whose result Triton types
as bfloat16 computes in float32 and rounds to nearest, ties to even. For one +, −, ·, / that is the correctly rounded
result, as float32 has more than twice the digits. Which operations stay in bfloat16 and which are promoted (reductions,
quotients) is decided by Triton's own front end, as when it compiles. ``tl.dot`` adds products of bfloat16 numbers,
exact in float32, to its float32 accumulator.

The memory of every launch is watched (``kernel_memory.py``), and its programs run in a random order.

A row of ``tl.dot`` is the same bits wherever it lies in its block, as on a GPU. The interpreter itself multiplies by
BLAS, which promises no such thing: OpenBLAS without AVX-512 adds the products of some rows of a block in another order.

Faster: the interpreter replaces all functions of ``triton.language`` at each launch and each call of a function; once a
module is enough, as nothing is compiled in these processes. It computes every sum and product of integers a second time
for an assertion about overflow, which it leaves out without ``debug``. Both took three quarters of its time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from kernel_memory import Launch

_random = np.random.default_rng(0)
_QUIET_NAN = np.uint16(0x7FC0)


def widen(bits: np.ndarray) -> np.ndarray:
    """uint16, the bits of bfloat16 numbers, to these numbers in float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(numbers: np.ndarray) -> np.ndarray:
    """Numbers to the bits of their nearest bfloat16 numbers, ties to even, uint16."""
    bits = np.asarray(numbers, np.float32, order="C").view(np.uint32)
    nearest = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, _QUIET_NAN, nearest)


def _is_bfloat16(dtype: Any) -> bool:
    return dtype.scalar == tl.bfloat16


def _numpy_dtype_once(dtype: Any) -> np.dtype:
    scalar = dtype.scalar
    if scalar.name not in _numpy_dtypes:
        _numpy_dtypes[scalar.name] = np.dtype(np.float32) if _is_bfloat16(scalar) else _numpy_dtype(scalar)
    return _numpy_dtypes[scalar.name]


def _bits_of(handle: Any) -> np.ndarray:
    return narrow(handle.data) if _is_bfloat16(handle.dtype) else handle.data


_check_size = interpreter.TensorHandle.__post_init__
_numpy_dtype = interpreter._get_np_dtype
_numpy_dtypes: dict[str, np.dtype] = {}
_patch_language = interpreter._patch_lang
_patched_for: set[str] = set()  # modules


def _round_or_check(handle: Any) -> None:
    """``__post_init__`` of a value. A comparison labels its booleans with the type of its operands."""
    if not _is_bfloat16(handle.dtype) or handle.data.dtype == np.bool_:
        return _check_size(handle)
    assert handle.data.dtype.kind == "f", f"an operation has made {handle.data.dtype} of bfloat16 numbers"
    handle.data = widen(narrow(handle.data))


class _Builder(interpreter.InterpreterBuilder):
    """The operations that see bits, and casts. All others are as they were: the value that they make is rounded."""

    launch: Launch  # the one that runs
    order: np.ndarray  # of its programs

    def get_bf16(self, value: float) -> Any:
        return interpreter.TensorHandle(np.array([value], np.float32), tl.bfloat16)

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        super().set_grid_dim(nx, ny, nz)
        self.order = _random.permutation(nx * ny * nz)

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        program = int(self.order[(x * ny + y) * nz + z])
        super().set_grid_idx(program // (ny * nz), program // nz % ny, program % nz)
        self.launch.begin(program)

    def create_barrier(self) -> None:
        self.launch.barriers += 1

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *hints: Any, **named_hints: Any) -> Any:
        self.launch.access(ptrs, mask.data, writes=False)
        if not _is_bfloat16(ptrs.get_element_ty()):
            return super().create_masked_load(ptrs, mask, other, *hints, **named_hints)
        masked = np.zeros_like(ptrs.data, np.uint16) if other is None else narrow(other.data)
        bits = interpreter._interpreter.load(ptrs.data, mask.data, masked, np.dtype(np.uint16))
        return interpreter.TensorHandle(widen(bits), tl.bfloat16)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *hints: Any) -> None:
        self.launch.access(ptrs, mask.data, writes=True)
        interpreter._interpreter.store(ptrs.data, _bits_of(value), mask.data)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        return interpreter.TensorHandle(src.data.astype(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        """From and to FP8."""
        if _is_bfloat16(src.dtype):
            src = interpreter.TensorHandle(src.data, tl.float32)
        if not _is_bfloat16(dst_type):
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        assert rounding_mode is None, "another rounding to bfloat16 than to nearest"
        return self.cast_impl(super().create_fp_to_fp(src, tl.float32, None), dst_type)

    def create_bitcast(self, src: Any, dst_type: Any) -> Any:
        bits = _bits_of(src)
        if _is_bfloat16(dst_type):
            return interpreter.TensorHandle(widen(bits.view(np.uint16)), tl.bfloat16)
        return interpreter.TensorHandle(bits.view(interpreter._get_np_dtype(dst_type)), dst_type.scalar)

    def create_dot(self, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        def numbers(factor: Any) -> np.ndarray:
            if factor.dtype.is_fp8():
                factor = super(_Builder, self).create_fp_to_fp(factor, tl.float32, None)
            return np.ascontiguousarray(factor.data, d.data.dtype)

        product = np.einsum("...mk,...kn->...mn", numbers(a), numbers(b), optimize=False)  # optimised it calls BLAS
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def create_fabs(self, arg: Any) -> Any:
        return self.unary_op(arg, np.abs) if _is_bfloat16(arg.dtype) else super().create_fabs(arg)

    def create_atomic_rmw(self, operation: Any, ptr: Any, val: Any, *others: Any) -> Any:
        assert not _is_bfloat16(val.dtype), "no kernel has atomic operations in bfloat16"
        self.launch.atomic(ptr, others[0].data)
        return super().create_atomic_rmw(operation, ptr, val, *others)


class _Executor(interpreter.GridExecutor):
    """A launch, whose memory is watched."""

    def __call__(self, *args: Any, **named: Any) -> None:
        tensors = [x for x in (*args, *named.values()) if hasattr(x, "data_ptr")]
        builder = interpreter.interpreter_builder
        builder.launch = Launch(self.fn.__name__, tensors)
        super().__call__(*args, **named)
        builder.launch.check()


def _patch_language_once(function: Any) -> Any:
    if function.__module__ not in _patched_for:
        _patch_language(function)
        _patched_for.add(function.__module__)
    return interpreter._LangPatchScope()  # with nothing to restore


def install() -> None:
    """From now on Triton's interpreter is this one, in this process."""
    interpreter.interpreter_builder.__class__ = _Builder
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=False)
    interpreter.GridExecutor = _Executor
    interpreter.TensorHandle.__post_init__ = _round_or_check
    interpreter._get_np_dtype = _numpy_dtype_once
    interpreter._patch_lang = _patch_language_once
