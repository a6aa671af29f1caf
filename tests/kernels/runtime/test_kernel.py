"""A launch takes the compiled kernel that Triton's own launch takes, with the same arguments, also when it has been
launched before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction, KernelInterface

from dsa_engine.kernels.runtime.kernel import Kernel, kernel
from dsa_engine.kernels.runtime.launch import INTERPRETED
from kernel_bench import compile_only

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter compiles nothing")


def _copy(x, also, out, count, stride, factor, ADD: tl.constexpr = False, BLOCK: tl.constexpr = 16):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at * stride, mask=at < count, other=0) * factor
    if ADD and also is not None:
        values += tl.load(also + at, mask=at < count, other=0)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < count)


BYTES = torch.zeros(4096, dtype=torch.uint8)
assert BYTES.data_ptr() % 16 == 0


def at(offset: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor that begins so many bytes after a multiple of 16."""
    return BYTES[offset : offset + 256].view(dtype)


X, Y, OUT = at(0), at(512), at(1024)
# x, also, out, count, stride, factor; constants and options. Each is another kernel to Triton, but those in EQUAL.
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "first": ((X, None, OUT, 48, 32, 0.5), {}),
    "x not at 16 bytes": ((at(4), None, OUT, 48, 32, 0.5), {}),
    "x at 8 bytes": ((at(8), None, OUT, 48, 32, 0.5), {}),
    "out not at 16 bytes": ((X, None, at(1028), 48, 32, 0.5), {}),
    "another dtype": ((at(0, torch.bfloat16), None, OUT, 48, 32, 0.5), {}),
    "its bytes": ((at(0, torch.uint8), None, OUT, 48, 32, 0.5), {}),
    "a tensor for none": ((X, Y, OUT, 48, 32, 0.5), {}),
    "a stride of 1": ((X, None, OUT, 48, 1, 0.5), {}),
    "a stride of no 16": ((X, None, OUT, 48, 33, 0.5), {}),
    "a wide stride": ((X, None, OUT, 48, 1 << 31, 0.5), {}),
    "a wide stride of no 16": ((X, None, OUT, 48, (1 << 31) + 1, 0.5), {}),
    "a count of 1": ((X, None, OUT, 1, 32, 0.5), {}),
    "a wide count": ((X, None, OUT, 1 << 31, 32, 0.5), {}),
    "an integer for a float": ((X, None, OUT, 48, 32, 2), {}),
    "a constant": ((X, None, OUT, 48, 32, 0.5), {"BLOCK": 32}),
    "another constant": ((X, Y, OUT, 48, 32, 0.5), {"ADD": True}),
    "an option": ((X, None, OUT, 48, 32, 0.5), {"num_warps": 2}),
    "another option": ((X, None, OUT, 48, 32, 0.5), {"num_stages": 5}),
}
# The count is not specialised.
EQUAL = {("x not at 16 bytes", "x at 8 bytes"), ("first", "a count of 1")}


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[Any, ...]]]]:
    """What Triton's launchers get: a kernel's hash, and all but hooks."""
    given: list[tuple[str, tuple[Any, ...]]] = []

    def launcher(driver: Any, source: Any, metadata: Any) -> Any:
        return lambda *all_: given.append((metadata.hash, (*all_[:6], *all_[9:])))

    monkeypatch.setattr(compile_only._Driver, "launcher_cls", launcher)
    compile_only._driver_for.cache_clear()
    yield given
    compile_only._driver_for.cache_clear()


def same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, torch.Tensor) else bool(a == b and type(a) is type(b))


def test_every_launch_takes_tritons_kernel(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    ours = kernel(do_not_specialize=["count"])(_copy)
    assert isinstance(ours, Kernel)
    hashes: dict[str, str] = {}
    for again in range(3):
        for capability in (90, 80):
            with compile_only.compile_only(capability):
                for name, (arguments, how) in CALLS.items():
                    launched.clear()
                    ours[3, 2](*arguments, **how)
                    if again < 2:  # the second time before and after launches by Triton
                        KernelInterface.__getitem__(ours, (3, 2))(*arguments, **how)
                        (number, given), (expected, wanted) = launched
                        assert number == expected, f"{name}: another kernel than Triton's, time {again}"
                        assert all(map(same, given, wanted)) and len(given) == len(wanted), name
                    else:
                        ((number, _),) = launched
                    assert hashes.setdefault(f"{name}, sm_{capability}", number) == number, name
    for a, b in combinations(CALLS, 2):
        for capability in (90, 80):
            equal = hashes[f"{a}, sm_{capability}"] == hashes[f"{b}, sm_{capability}"]
            assert equal == ((a, b) in EQUAL), f"{a}, {b}"
    assert not {hashes[f"{name}, sm_90"] for name in CALLS} & {hashes[f"{name}, sm_80"] for name in CALLS}


def test_a_second_launch_binds_no_kernel_by_triton(
    launched: list[tuple[str, tuple[Any, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = kernel(_copy)
    arguments, how = CALLS["first"]
    with compile_only.compile_only(90):
        ours[(1,)](*arguments, **how)
        with monkeypatch.context() as patch:
            patch.setattr(JITFunction, "run", None)
            ours[(1,)](*arguments, **how)
            ours[4, 5, 6](X, None, at(2048), 32, 48, 1.5)
        assert [given[:3] for _, given in launched] == [(1, 1, 1), (1, 1, 1), (4, 5, 6)]
        assert [float(given[11]) for _, given in launched] == [0.5, 0.5, 1.5]


def test_hooks_of_a_profiler_are_called(launched: list[tuple[str, tuple[Any, ...]]]) -> None:
    """As Triton calls them: the launcher gets them."""
    ours, seen = kernel(_copy), []
    runs: list[SimpleNamespace] = []
    hook = triton.knobs.runtime.launch_enter_hook
    with compile_only.compile_only(90):
        arguments, how = CALLS["first"]
        ours[(1,)](*arguments, **how)
        (compiled,) = ours._compiled.values()
        ours._compiled = {key: ((lambda *_: runs.append(SimpleNamespace())), *compiled[1:]) for key in ours._compiled}
        ours[(1,)](*arguments, **how)
        assert len(runs) == 1
        hook.add(seen.append)
        try:
            ours[(1,)](*arguments, **how)
        finally:
            hook.remove(seen.append)
        assert len(runs) == 1 and len(launched) == 2
