"""The CPU's kernels: C++ sources in ``kernels/cpu``, compiled for this machine when they are first needed.

They do what the references do, which stay their definition, and run instead of them on CPU tensors (:func:`serves`):
they read and write float32, bfloat16 and float16, read weights as they are stored, and compute in float32. A tile of
work belongs to one thread, of which there are as many as PyTorch may use; nothing inside it waits for another.

The library lies in the user's cache folder (:func:`user_cache`, `native_library.py`). Without a compiler, or with
``DSA_ENGINE_NATIVE=0``, the references run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from dsa_engine.kernels.runtime import launch, native_library

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parents[1] / "cpu"
# Multiply-adds that are worth another thread, some 10 µs: a thread that is awake takes a few to begin.
_WORTH_A_THREAD = 1 << 18
_EXPANDED_NUMBERS = 1 << 22  # 16 MiB of a weight

_FUNCTIONS: dict[str, tuple[list[type[ctypes._SimpleCData]], type[ctypes._SimpleCData] | None]] = {
    "dsa_expert_mlp_scratch": ([c_int64] * 5, c_int64),
    "dsa_expert_mlp": ([c_void_p] * 9 + [c_int64] * 13, c_int64),
    "dsa_multiply_adds": ([c_void_p, c_int64], c_int64),
    "dsa_per_head_matmul": ([c_void_p] * 3 + [c_int64] * 13, None),
    "dsa_lightning_indexer_scratch": ([c_int64] * 5, c_int64),
    "dsa_lightning_indexer": ([c_void_p] * 11 + [c_int64] * 12, c_int64),
    "dsa_linear": ([c_void_p] * 4 + [c_int64] * 10, None),
    "dsa_replay": ([c_void_p, c_int64], c_int64),
    "dsa_rms_norm": ([c_void_p] * 6 + [c_int64] * 4 + [c_float, c_int64], None),
    "dsa_rope": ([c_void_p] * 4 + [c_int64] * 12, None),
    "dsa_route_scratch": ([c_int64] * 2, c_int64),
    "dsa_route": ([c_void_p] * 6 + [c_int64] * 6 + [c_float, c_int64], None),
    "dsa_silu_mul": ([c_void_p] * 2 + [c_int64] * 5, None),
    "dsa_slots_of": ([c_void_p] * 4 + [c_int64] * 7, c_int64),
    "dsa_sparse_attention_scratch": ([c_int64] * 3, c_int64),
    "dsa_sparse_attention": ([c_void_p] * 7 + [c_int64] * 8 + [c_float, c_int64], c_int64),
    "dsa_store_index_keys": ([c_void_p] * 7 + [c_int64] * 12 + [c_float, c_int64], c_int64),
    "dsa_store_latent": ([c_void_p] * 6 + [c_int64] * 12 + [c_float, c_int64], c_int64),
}

# Numbers of the types that kernels read and write (``cpu/tiles.h``).
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
ROUNDED = 3  # rows as products of codes make them (``cpu/products.h``)


def serves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether operations on these run the CPU's kernels, which are compiled if they have not been: on CPU tensors of
    one dtype, by default any of ``TYPES``, without a gradient, where neither Triton nor the references are to run."""
    if not tensors[0].is_cpu or not launch.runs_native():
        return False
    if dtype is None and (dtype := tensors[0].dtype) not in TYPES:
        return False
    graded = torch.is_grad_enabled()
    for x in tensors:  # a plain loop: this runs many times a step
        if x.dtype != dtype or not x.is_cpu or (graded and x.requires_grad):
            return False
    return library() is not None


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether an operation that has both kinds of kernels runs one of them on ``x``, or its reference."""
    return launch.runs_triton(x) or serves(x)


def runs_product(x: torch.Tensor) -> bool:
    """Whether a product with a plain weight runs a kernel on ``x``, or PyTorch's."""
    return serves(x) or (launch.is_batch_invariant() and launch.runs_triton(x))


def takes(rows: int, few: int) -> bool:
    """Whether the kernels take so many rows, which PyTorch multiplies faster beyond ``few``: under
    :func:`.launch.batch_invariance` they take any number."""
    return rows <= few or launch.is_batch_invariant()


def refuse_variant(x: torch.Tensor, what: str) -> None:
    """Before PyTorch's products run on a CPU: raises ``ValueError`` under :func:`.launch.batch_invariance`, as they add
    in orders that follow from the number of rows."""
    if launch.is_batch_invariant() and x.is_cpu and launch.runs_native():
        raise ValueError(
            f"batch_invariant: the CPU's kernels do not take {what}, and PyTorch's products add by the number of rows; "
            "give another format of weights, or leave batch_invariant out"
        )


@functools.cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this half type by the processor's own instructions, or 5 times slower than float32."""
    if not torch.backends.mkldnn.is_available():
        return False
    ops = torch.ops.mkldnn  # they heed ONEDNN_MAX_CPU_ISA
    return ops._is_mkldnn_bf16_supported() if dtype == torch.bfloat16 else ops._is_mkldnn_fp16_supported()


def expands(x: torch.Tensor) -> bool:
    """Whether products of ``x`` by PyTorch are to be made in float32: of half types, by a CPU that has none of them."""
    return x.is_cpu and x.dtype in (torch.bfloat16, torch.float16) and not has_products(x.dtype)


def multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """PyTorch's product ``out = a · b``, or of a batch of matrices; where it :func:`expands`, of b some columns at a
    time, rounded once."""
    product = torch.mm if a.dim() == 2 else torch.bmm
    if not expands(a):
        return product(a, b, out=out)
    columns = max(64, _EXPANDED_NUMBERS * b.shape[-1] // max(1, b.numel()))
    rows = a.float()
    for part, some in zip(out.split(columns, -1), b.split(columns, -1), strict=True):
        part.copy_(product(rows, some.float()))
    return out


def threads_for(multiply_adds: int) -> int:
    """Number of threads for this much work: those that PyTorch may use, and fewer for little work."""
    worth = multiply_adds // _WORTH_A_THREAD
    return 1 if worth <= 1 else min(torch.get_num_threads(), worth)


def kernels() -> Any:
    """The compiled kernels, for code that has asked :func:`serves`; within :func:`watched` what that gives for each."""
    loaded = library()
    assert loaded is not None
    return loaded if _of_thread.watch is None else _Watched()


class _OfThread(threading.local):
    watch: Callable[[str, Any], Any] | None = None


_of_thread = _OfThread()


class _Watched:
    def __getattr__(self, name: str) -> Any:
        assert _of_thread.watch is not None
        return _of_thread.watch(name, getattr(library(), name))


@contextmanager
def watched(watch: Callable[[str, Any], Any]) -> Iterator[None]:
    """Within, code of this thread that asks for a kernel gets ``watch(name, kernel)``."""
    _of_thread.watch = watch
    try:
        yield
    finally:
        _of_thread.watch = None


def row_threads(numbers: int) -> int:
    """:func:`threads_for` of an operation that reads and writes these numbers and multiplies little: it waits for
    memory."""
    return threads_for(4 * numbers)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, loaded once; None, and a line in the log, where there are none."""
    if os.environ.get("DSA_ENGINE_NATIVE") == "0":
        return None
    try:
        loaded = native_library.load(_SOURCES, user_cache() / f"native-{os.geteuid()}")
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result
        return loaded
    except (OSError, RuntimeError, ValueError, AttributeError) as problem:
        logger.warning(
            "the CPU kernels are NOT used, the PyTorch references run instead, slower: %s; DSA_ENGINE_NATIVE=0 does "
            "without them and without this line",
            problem,
        )
        return None


def user_cache() -> Path:
    """Folder for files that can be made again: ``$DSA_ENGINE_CACHE``, else the user's cache folder.

    Raises:
        OSError: the user has no home folder, and none was named.
    """
    if named := os.environ.get("DSA_ENGINE_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "dsa_engine"
    try:
        return Path.home() / ".cache" / "dsa_engine"
    except RuntimeError as error:
        raise OSError("there is no home folder for the cache; set DSA_ENGINE_CACHE to a folder") from error


@functools.cache
def digest() -> str:
    """Names the machine code of the kernels."""
    return native_library.digest(_SOURCES)
