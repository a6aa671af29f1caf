"""The CPU's kernels: C++ sources in ``kernels/native``, compiled for this machine when they are first needed.

They do in float32 what the references do, which stay their definition, and run instead of them on CPU tensors
(:func:`serves`). A tile of work belongs to one thread, of which there are as many as PyTorch may use; nothing inside it
waits for another.

The library lies in the user's cache folder (:func:`user_cache`), under the digest of its sources, its compiler and the
processor's features. Where there is no compiler, or ``DSA_ENGINE_NATIVE=0`` says so, the references run.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path

import torch

from dsa_engine.kernels.runtime import launch

logger = logging.getLogger(__name__)

_SOURCES = Path(__file__).parents[1] / "native"
_FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-pthread")
_COMPILER_SECONDS = 300
# Multiply-adds that are worth another thread, some 10 µs: a thread that is awake takes a few to begin.
_WORTH_A_THREAD = 1 << 18

_FUNCTIONS: dict[str, tuple[list[type[ctypes._SimpleCData]], type[ctypes._SimpleCData] | None]] = {
    "dsa_expert_mlp_scratch": ([c_int64] * 4, c_int64),
    "dsa_expert_mlp": ([c_void_p] * 7 + [c_int64] * 6, c_int64),
    "dsa_per_head_matmul": ([c_void_p] * 3 + [c_int64] * 12, None),
    "dsa_lightning_indexer_scratch": ([c_int64] * 4, c_int64),
    "dsa_lightning_indexer": ([c_void_p] * 9 + [c_int64] * 10, c_int64),
    "dsa_linear": ([c_void_p] * 3 + [c_int64] * 5, None),
    "dsa_rms_norm": ([c_void_p] * 6 + [c_int64] * 3 + [c_float, c_int64], None),
    "dsa_rope": ([c_void_p] * 4 + [c_int64] * 11, None),
    "dsa_route_scratch": ([c_int64] * 2, c_int64),
    "dsa_route": ([c_void_p] * 6 + [c_int64] * 6 + [c_float, c_int64], None),
    "dsa_silu_mul": ([c_void_p] * 2 + [c_int64] * 4, None),
    "dsa_slots_of": ([c_void_p] * 4 + [c_int64] * 7, c_int64),
    "dsa_sparse_attention_scratch": ([c_int64] * 3, c_int64),
    "dsa_sparse_attention": ([c_void_p] * 7 + [c_int64] * 7 + [c_float, c_int64], c_int64),
    "dsa_store_index_keys": ([c_void_p] * 7 + [c_int64] * 11 + [c_float, c_int64], c_int64),
    "dsa_store_latent": ([c_void_p] * 6 + [c_int64] * 11 + [c_float, c_int64], c_int64),
}


def serves(*tensors: torch.Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether operations on these run the CPU's kernels, which are compiled if they have not been: on CPU tensors of
    the dtype without a gradient, where neither Triton nor the references are to run."""
    if not launch.runs_native():
        return False
    graded = torch.is_grad_enabled()
    for x in tensors:  # a plain loop: this runs many times a step
        if x.dtype != dtype or not x.is_cpu or (graded and x.requires_grad):
            return False
    return library() is not None


def runs_kernel(x: torch.Tensor) -> bool:
    """Whether an operation that has both kinds of kernels runs one of them on ``x``, or its reference."""
    return launch.runs_triton(x) or serves(x)


def threads_for(multiply_adds: int) -> int:
    """Number of threads for this much work: those that PyTorch may use, and fewer for little work."""
    return max(1, min(torch.get_num_threads(), multiply_adds // _WORTH_A_THREAD))


def kernels() -> ctypes.CDLL:
    """The compiled kernels, for code that has asked :func:`serves`."""
    loaded = library()
    assert loaded is not None
    return loaded


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
        loaded = _load()
        for name, (arguments, result) in _FUNCTIONS.items():
            function = getattr(loaded, name)
            function.argtypes, function.restype = arguments, result
        return loaded
    except (OSError, RuntimeError, ValueError, AttributeError, subprocess.SubprocessError) as problem:
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
    if os.environ.get("DSA_ENGINE_CACHE"):
        return Path(os.environ["DSA_ENGINE_CACHE"])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "dsa_engine"
    try:
        return Path.home() / ".cache" / "dsa_engine"
    except RuntimeError as error:
        raise OSError("there is no home folder for the cache; set DSA_ENGINE_CACHE to a folder") from error


@functools.cache
def digest() -> str:
    """Digest of the sources, compiler, flags and processor: the same for the same machine code.

    Raises:
        RuntimeError: there is no compiler.
    """
    command = _compiler()
    version = subprocess.run([*command, "--version"], capture_output=True, timeout=_COMPILER_SECONDS, check=True)
    about = hashlib.blake2b(repr((command, _FLAGS, platform.machine(), _features())).encode(), digest_size=10)
    about.update(version.stdout)
    for source in sorted(_SOURCES.iterdir()):
        about.update(source.read_bytes())
    return about.hexdigest()


def _load() -> ctypes.CDLL:
    """Compiles the library unless it is there. Of several processes one compiles, the others wait for it."""
    built = user_cache() / "native" / f"kernels-{digest()}.so"
    built.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    if built.parent.stat().st_mode & stat.S_IWOTH:
        raise RuntimeError(
            f"any user may write to {built.parent}, and its files are run; chmod o-w it, or name another folder "
            "in DSA_ENGINE_CACHE"
        )
    with suppress(OSError):  # there is none, or it is damaged
        return ctypes.CDLL(str(built))
    with open(built.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released with the process
        with suppress(OSError):  # another process has made it since
            return ctypes.CDLL(str(built))
        _compile(built)
        return ctypes.CDLL(str(built))


def _compile(built: Path) -> None:
    """Writes the library whole or not at all."""
    unfinished = built.with_suffix(f".{os.getpid()}")
    sources = sorted(_SOURCES.glob("*.cpp"))
    logger.info("compiling the CPU kernels, once for this machine: some seconds")
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = [os.path.join(folder, f"{source.stem}.o") for source in sources]
            [*pool.map(lambda source, into: _run("-c", "-o", into, str(source)), sources, objects)]
            _run("-shared", "-o", str(unfinished), *objects)
        unfinished.chmod(0o755)
        unfinished.replace(built)
    finally:
        unfinished.unlink(missing_ok=True)


def _run(*arguments: str) -> None:
    """The compiler; ``RuntimeError`` with its first error where it has one."""
    done = subprocess.run(
        [*_compiler(), *_FLAGS, *arguments],
        capture_output=True, text=True, errors="replace", timeout=_COMPILER_SECONDS,
    )  # fmt: skip
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise RuntimeError(f"they do not compile: {lines[0]:.300}")


def _compiler() -> list[str]:
    """The command of ``$CXX``, else g++, c++ or clang++; the first that there is."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        words = shlex.split(name)
        if words and (compiler := shutil.which(words[0])):
            return [compiler, *words[1:]]
    raise RuntimeError("there is no C++ compiler; install g++, or set CXX")


def _features() -> str:
    """Features of the processor, as far as Linux lists them: ``-march=native`` compiles for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = ("flags", "Features", "model", "CPU part", "vendor_id")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in named}))
