"""Kernels whose launches cost the host about half of what Triton's own cost.

A launch by Triton names the compiled kernel by a string of all constants and options, compares the global values that
it was compiled with, and prepares hooks that nothing has set. Here the kernel is looked up by what Triton's binder says
of the arguments (which integers are 1, multiples of 16 or wider than 32 bits; of tensors the dtype, and whether they
begin at a multiple of 16 bytes) and by constants, options and device: by all that Triton compiles another kernel for.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from dsa_engine.kernels.runtime.launch import INTERPRETED

# Those that were read: what a binder returns, and how a compiled kernel is run, are not in Triton's documentation.
_KNOWN = triton.__version__.startswith(("3.6.", "3.7."))
WATCHES = _KNOWN and not INTERPRETED  # whether launches can be watched

_settings = triton.knobs.runtime


def _called(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    return function(*args, **named)


call: Callable[..., Any] = getattr(operator, "call", _called)  # Python 3.11 has a built-in one


class _OfThread(threading.local):
    """
    Attributes:
        watch: see :func:`watched`.
        as_one: ``as_one(function, *args, **named)`` calls the function. A record (`pieces.py`) has it as one call,
            whatever it launches, does or reads, with the tensors and objects of each layer among its arguments;
            ``function`` itself is the same for all layers.
    """

    watch: Any = None
    as_one: Callable[..., Any] = staticmethod(call)


this_thread = _OfThread()


class Kernel(JITFunction):
    """A kernel that is launched as any other of Triton: ``kernel[grid](*arguments, **constants and options)``.

    Triton's settings (``TRITON_DEBUG`` and others) are those of a variant's first launch.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._compiled: dict[Any, tuple[Any, Any, Any]] = {}  # launcher, function, metadata

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        watch = this_thread.watch
        return partial(self.launch, grid) if watch is None else partial(watch.launched, self, grid)

    def launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Launches the kernel on the current stream of the current device."""
        here = driver.active
        device = here.get_current_device()
        bound, classes, options = self.device_caches[device][-1](*args, **constants)
        key = (device, *classes, *options.items())
        compiled = self._compiled.get(key)
        if compiled is None or _settings.launch_enter_hook.calls or _settings.launch_exit_hook.calls:
            kernel = self.run(*args, grid=grid, warmup=False, **constants)
            self._compiled[key] = kernel.run, kernel.function, kernel.packed_metadata
            return
        run, function, metadata = compiled
        x, y, z = (*grid, 1, 1)[:3]
        run(x, y, z, here.get_current_stream(device), function, metadata, None, None, None, *bound.values())

    def again(self, grid: tuple[int, ...], args: Any, constants: dict[str, Any]) -> tuple[Any, list[Any]]:
        """What repeats a launch that has been made, on the stream that is the current one now: a function and its
        arguments."""
        device = driver.active.get_current_device()
        bound, classes, options = self.device_caches[device][-1](*args, **constants)
        key = (device, *classes, *options.items())
        run, function, metadata = self._compiled[key]
        x, y, z = (*grid, 1, 1)[:3]
        stream = driver.active.get_current_stream(device)
        return run, [x, y, z, stream, function, metadata, None, None, None, *bound.values()]


@contextmanager
def watched(watch: Any) -> Iterator[None]:
    """Within, launches of this thread are ``watch.launched(kernel, grid, …)``, and what is run as one is
    ``watch.called(function, …)``; None: both as without a watch."""
    before = this_thread.watch, this_thread.as_one
    this_thread.watch, this_thread.as_one = watch, call if watch is None else watch.called
    try:
        yield
    finally:
        this_thread.watch, this_thread.as_one = before


def as_one(function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
    """What ``this_thread.as_one`` does in the thread, and at the time, of this call."""
    return this_thread.as_one(function, *args, **named)


def kernel(function: Any = None, **options: Any) -> Any:
    """``triton.jit`` for a kernel that is launched; what kernels call is ``triton.jit``."""
    if function is None:
        return partial(kernel, **options)
    return Kernel(function, **options) if WATCHES else triton.jit(function, **options)
