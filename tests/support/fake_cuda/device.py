"""The fake device: its operations, their launches and allocations, and the host's waits."""

from __future__ import annotations

import atexit
import math
import traceback
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.nn.attention import bias as attention_bias
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.kernel import Kernel
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.weights import DummyReader
from fake_cuda import cuda_runtime
from fake_cuda.events import Capture, Launch
from fake_cuda.indexing import Indexing
from fake_cuda.lifetimes import Lifetimes

aten = torch.ops.aten

# Operations without a launch, besides those that return views.
_NO_LAUNCH = {
    "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided",
    "aten::_unsafe_view", "aten::_reshape_alias", "aten::detach", "aten::lift_fresh", "aten::alias",
}  # fmt: skip
_PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_grouped_mm", "aten::_scaled_mm"}
_ALIGNED = 512  # bytes: PyTorch's allocator rounds up to this
_GRID_LIMIT = (2**31 - 1, 65535, 65535)  # CUDA's limits of programs in x, y and z


def _launch(kernel: Kernel, grid: tuple[int, ...], names: list[str], *args: Any) -> None:
    count = len(args) - len(names)
    kernel.launch(grid, *args[:count], **dict(zip(names, args[count:], strict=True)))


class _NoDevice(FakeTensorMode):
    """Does not look for the device that ``torch.cuda`` reports."""

    @property
    def avoid_device_init(self) -> bool:
        return True


class _Dispatch(TorchDispatchMode):
    """Passes every operation to ``handle``."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]):
        super().__init__()
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})


class FakeDevice:
    """Inside the context ``cuda:0`` exists, and its tensors have no values. Tensors on the CPU are real.

    Values that the host reads from the device are zero. An operation whose result's *shape* depends on values on the
    device is an error here: no step may need one. Random weights (``load_format="dummy"``) are not filled.

    Args:
        capability: compute capability, such as 90 for ``sm_90``.
        memory: bytes of its memory.

    Attributes:
        launches: launches in order; one per operation of PyTorch.
        waits: the host's waits for the device: operation and line of code.
        waited: number of launches before each wait.
        live, peak: bytes of the existing tensors, and their maximum.
        cached: bytes that PyTorch's allocator holds: the peak since it was last emptied.
        pools: bytes of each pool of CUDA graphs: the peak of its captures.
        outside: bytes in use outside of this allocator: other programs, NCCL.
        emptied: how often the allocator was emptied.
        pinnable: bytes of host memory that can be pinned at once.
        connected: collectives that have run, with their number of ranks.
        reached: for each stream, how many launches of every stream come before its next one.
        stream, streams_used: the current stream, and all streams with a launch; 0 is the default one.
        capturing: whether a CUDA graph is being captured; then no wait is allowed.
        captures: the graphs captured so far.
    """

    def __init__(self, capability: int = 90, memory: int = 141 * 10**9):
        if INTERPRETED:
            raise RuntimeError("kernels run in the interpreter under TRITON_INTERPRET=1, which needs values; unset it")
        self.capability = capability
        self.memory = memory
        self.launches: list[Launch] = []
        self.waits: list[str] = []
        self.waited: list[int] = []
        self.live = self.peak = self.cached = self.outside = self.emptied = 0
        self.pools: dict[tuple[int, int] | None, int] = {}
        self.pinnable = memory
        self.connected: set[tuple[str, int]] = set()
        self.stream = 0
        self.streams_used: set[int] = set()
        self.reached: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self._lifetimes = Lifetimes(self.reached)
        self.capturing = False
        self.captures: list[Capture] = []
        self._streams: dict[tuple[tuple[int, ...], int], Any] = {}
        self._fake = _NoDevice(allow_non_fake_inputs=True)
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._pinned: set[int] = set()
        self.pinned_ranges: dict[int, int] = {}  # address and bytes
        self._stack = ExitStack()

    def __enter__(self) -> FakeDevice:
        with ExitStack() as stack:
            stack.enter_context(self._fake)  # first, as it checks for CUDA
            for where, name, instead in (
                (Kernel, "launch", lambda kernel, *args, **how: self._run_kernel(kernel, *args, **how)),
                (
                    Kernel,
                    "again",
                    lambda kernel, grid, args, how: (partial(_launch, kernel, grid, [*how]), [*args, *how.values()]),
                ),
                (DummyReader, "load", lambda *_: None),
                (KVCache, "fill_random", lambda *_: None),
                (atexit, "register", lambda *_: None),
                (attention_bias, "causal_lower_right", lambda *_: None),  # a tensor of a type that cannot be faked
                (torch.Tensor, "pin_memory", lambda values: self._pin(values)),
            ):
                stack.enter_context(mock.patch.object(where, name, instead))
            stack.enter_context(cuda_runtime.replaced(self))
            stack.enter_context(Indexing())
            stack.enter_context(_Dispatch(self.dispatch))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @contextmanager
    def watched(self) -> Iterator[FakeDevice]:
        """Resets the counts: launches and waits to none, the peak to the existing tensors."""
        self.launches, self.waits, self.waited, self.peak = [], [], [], self.live
        yield self

    def stream_of(self, ranks: tuple[int, ...], communicator: int) -> Any:
        """The stream of a process group."""
        if (ranks, communicator) not in self._streams:
            self._streams[ranks, communicator] = torch.cuda.Stream()
        return self._streams[ranks, communicator]

    def count(self, kind: str, name: str | None = None) -> int:
        """Number of launches of a kind, by any name or one."""
        return sum(launch.kind == kind and name in (None, launch.name) for launch in self.launches)

    def launch(self, launch: Launch, uses: Iterable[object] = ()) -> None:
        """Records a launch on the current stream, with the tensors that it uses.

        Raises:
            RuntimeError: the stream has not waited for one of them.
        """
        self.launches.append(launch._replace(stream=self.stream, before=self.reached[self.stream].copy()))
        self.reached[self.stream][self.stream] += 1
        number = self.reached[self.stream][self.stream]
        for tensor in uses:
            if isinstance(tensor, FakeTensor):
                self._lifetimes.use(id(tensor.untyped_storage()), self.stream, number)
        if not self.capturing:
            self.streams_used.add(self.stream)

    @property
    def reserved(self) -> int:
        """Bytes of the device that PyTorch holds."""
        return self.cached + sum(self.pools.values())

    def begin_capture(self) -> None:
        """Begins the capture of a CUDA graph."""
        self.capturing, self._captured_from, self._captured_peak = True, self.live, self.live
        self._captured_after = len(self.launches)

    def end_capture(self, pool: tuple[int, int] | None) -> None:
        """Ends the capture: its launches become the graph, its memory the graph's pool."""
        self.capturing = False
        held = self.launches[self._captured_after :]
        del self.launches[self._captured_after :]
        self.captures.append(Capture(self.stream, pool, held, self.stream in self.streams_used))
        self.pools[pool] = max(self.pools.get(pool, 0), self._captured_peak - self._captured_from)

    def empty_cache(self) -> None:
        """Releases unused memory of the allocator."""
        self.emptied += 1
        self.cached = self.live

    def wait(self, what: str, reached: Counter[int] | None = None) -> None:
        """Records a wait of the host for launches of the device; default: all before, on the current stream."""
        self._lifetimes.complete(self.reached[self.stream] if reached is None else reached)
        skipped = ("/fake_cuda/", "/kernels/runtime/transfer.py")  # the callers of these are recorded
        frames = [f for f in traceback.extract_stack() if not any(part in f.filename for part in skipped)]
        ours = [f"{f.filename.rpartition('/')[2]}:{f.name}" for f in frames if "/dsa_engine/" in f.filename]
        at = f"{what} in {ours[-1]}" if ours else what
        if self.capturing:
            raise RuntimeError(f"the host waits for the device while a CUDA graph is captured: {at}")
        self.waits.append(at)
        self.waited.append(len(self.launches))

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of PyTorch."""
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(isinstance(x, FakeTensor) for x in tensors)
        target = kwargs.get("device")
        if not there and (target is None or torch.device(target).type != "cuda"):
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        if func is aten.scaled_dot_product_attention.default:
            return self._attend(*args, **kwargs)
        if func.namespace == "prim":  # queries a tensor, and computes nothing
            with self._fake:
                return func(*args, **kwargs)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with _Dispatch(self.dispatch):
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        copied = self._copy(func, args, kwargs, tensors)
        if copied is not None:
            return copied
        with self._fake:
            result = func(*args, **kwargs)
        self._record(func, tensors, result)
        return result

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, *_: Any, **how: Any
    ) -> Any:
        """CUDA's choice in half precision: flash attention, or the kernel that takes a mask."""
        causal, scale = how.get("is_causal", False), how.get("scale")
        with _Dispatch(self.dispatch):
            if attn_mask is None:
                return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0]
            return aten._scaled_dot_product_efficient_attention(q, k, v, attn_mask, False, 0.0, causal, scale=scale)[0]

    def _copy(self, func: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Copies between host and device, and reads of values by the host; None for other operations."""
        name = func.name()
        if name == "aten::_local_scalar_dense":
            self.wait(name)
            with unset_fake_temporarily():
                return torch.zeros((), dtype=args[0].dtype).item()
        to_host = name == "aten::_to_copy" and torch.device(kwargs.get("device") or "cuda").type == "cpu"
        if to_host or (name == "aten::copy_" and not isinstance(args[0], FakeTensor)):
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.wait("copy to the host")
            with unset_fake_temporarily():
                dtype = kwargs.get("dtype") or args[0].dtype
                return torch.zeros(args[0].shape, dtype=dtype) if to_host else args[0].zero_()
        from_host = [x for x in tensors if not isinstance(x, FakeTensor)]
        if from_host and name in ("aten::_to_copy", "aten::copy_"):
            free = kwargs.get("non_blocking") or (len(args) > 2 and args[2])
            if from_host[0].numel() and not (free and self._is_pinned(from_host[0])):
                self.wait("copy from ordinary memory")
            if name == "aten::copy_":
                result = args[0]
            else:
                with self._fake:
                    result = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device="cuda:0")
            self._record(func, tensors, result)
            return result
        return None

    def _record(self, func: Any, tensors: list[torch.Tensor], result: Any) -> None:
        results = [x for x in tree_iter(result) if isinstance(x, torch.Tensor)]
        for tensor in results:
            self._own(tensor.untyped_storage())
        name = func.name().partition(".")[0]
        if func.is_view or name in _NO_LAUNCH or (results and not any(x.numel() for x in results)):
            return
        from_host = name in ("aten::_to_copy", "aten::copy_") and not all(isinstance(x, FakeTensor) for x in tensors)
        product = tuple(x.dtype for x in tensors if x.dim() > 1) if name in _PRODUCTS else ()
        self.launch(Launch("copy" if from_host else "torch", name, product), (*tensors, *results))

    def _own(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage while it exists."""
        if id(storage) in self._storages:
            return
        key, size = id(storage), cdiv(storage.nbytes(), _ALIGNED) * _ALIGNED

        def gone(_: object) -> None:
            self.live -= size
            self._storages.pop(key, None)
            self._lifetimes.free(key)

        self._lifetimes.allocate(key, self.capturing, self.stream)
        self._storages[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)
        if self.capturing:
            self._captured_peak = max(self._captured_peak, self.live)
        else:
            self.cached = max(self.cached, self.live)

    def _pin(self, values: torch.Tensor) -> torch.Tensor:
        pinned = values.clone()
        self._pinned.add(id(pinned))
        weakref.finalize(pinned, self._pinned.discard, id(pinned))
        return pinned

    def pin_range(self, address: int, size: int, flags: int) -> int:
        """``cudaHostRegister``; returns 0, or 2 if ``pinnable`` bytes are exceeded."""
        if size > self.pinnable:
            return 2
        self.pinned_ranges[address] = size
        return 0

    def unpin_range(self, address: int) -> int:
        """``cudaHostUnregister``."""
        del self.pinned_ranges[address]
        return 0

    def _is_pinned(self, values: torch.Tensor) -> bool:
        address = values.data_ptr()
        return id(values) in self._pinned or any(0 <= address - at < n for at, n in self.pinned_ranges.items())

    def _run_kernel(self, kernel: Any, grid: Any, *args: Any, **kwargs: Any) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor) and not value.is_cuda and not self._is_pinned(value):
                raise ValueError(f"{kernel.__name__} is given a tensor on the CPU, {tuple(value.shape)}")
        if any(not 0 < n <= limit for n, limit in zip(grid, _GRID_LIMIT, strict=False)):
            raise ValueError(f"{kernel.__name__} is launched with the grid {grid}; CUDA takes 1 to {_GRID_LIMIT}")
        assert math.prod(grid) > 0
        self.launch(Launch("triton", kernel.__name__), (*args, *kwargs.values()))
