"""Recordings: what a function runs on the CPU, to be run again without the Python between.

A decode step of a small model on a CPU spends a fifth of its time in Python, and always does the same: the same
kernels on the same addresses, as in a CUDA graph. A recording keeps the calls of the CPU's kernels, and PyTorch's
operations that compute or copy; views, checks and allocations are not repeated. Neighbouring calls of kernels are one
native call (``cpu/replay.cpp``).
"""

from __future__ import annotations

import ctypes
import struct
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dsa_engine.kernels.runtime import cpu

# Ways to read a tensor that the dispatcher does not see.
_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__}
_ALLOCATES = {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
# Without PyTorch's tag of shapes that follow from numbers.
_BY_NUMBERS = {
    torch.ops.aten.narrow.Tensor,
    torch.ops.aten.nonzero_numpy.default,
    torch.ops.aten.repeat_interleave.self_Tensor,
    torch.ops.aten.tensor_split.tensor_indices_or_sections,
    torch.ops.aten.where.default,
}

Blocks = defaultdict[int, list[torch.UntypedStorage]]


class _Kernels(NamedTuple):
    """Neighbouring calls of kernels, as ``cpu/replay.cpp`` takes them."""

    words: list[int]
    names: list[str]


class _Computed(NamedTuple):
    """A call of an operation of PyTorch, and the tensors that its results are copied to. Tensors of the recording are
    functions that make them (:func:`_tensor`), so that nothing keeps their blocks while it is made."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    into: list[Any]


class Recording:
    """What ``function`` runs; it is called once, in this thread.

    What it runs must follow from the contents of tensors alone, whose addresses stay: nothing may depend on a number
    that the host reads from a tensor or gets from elsewhere, and no other process may take part. Memory that the
    function allocates is made of blocks; those that it frees serve its later allocations.

    Args:
        blocks: by their bytes. Recordings that share them overwrite what others have left there, results too.

    Attributes:
        result: what the function returned; :meth:`replay` writes the same tensors again.
        refused: the operation that reads numbers from tensors, so that the function cannot be run again this way; None
            where there is none.
    """

    def __init__(self, function: Callable[[], torch.Tensor], blocks: Blocks | None = None):
        self.refused: str | None = None
        self._parts: list[_Kernels | _Computed] = []
        self._blocks = Blocks(list) if blocks is None else blocks
        self._held: dict[int, torch.UntypedStorage] = {}  # that others have allocated
        with cpu.watched(self._watched), _Reads(self), _Watch(self):
            self.result = function()
        self._runs = [_runner(part) for part in self._parts]

    @property
    def memory_bytes(self) -> int:
        """Bytes of the blocks."""
        return sum(size * len(blocks) for size, blocks in self._blocks.items())

    def replay(self) -> None:
        """Runs everything again.

        Raises:
            IndexError: a kernel has met slots, pages or experts that do not exist.
        """
        for run in self._runs:
            run()

    def _watched(self, name: str, function: Any) -> Any:
        """``function`` of the compiled kernels, which is recorded when it is called."""
        if name.endswith("_scratch"):
            return function
        entry = ctypes.cast(getattr(cpu.library(), f"{name}_words"), ctypes.c_void_p).value

        def call(*args: Any) -> Any:
            if not self._parts or not isinstance(self._parts[-1], _Kernels):
                self._parts.append(_Kernels([], []))
            words, names = self._parts[-1]  # type: ignore[misc]
            words += [entry, len(args), *(_word(arg, kind) for arg, kind in zip(args, function.argtypes, strict=True))]
            names.append(name)
            return function(*args)

        return call

    def computed(self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operation of PyTorch, and records it if it computes or copies."""
        result, schema = run(*args, **kwargs), run._schema
        if schema.name in _ALLOCATES:
            return self._allocated(result)
        if schema.name.startswith("profiler::"):
            return result
        given = {id_of(x): x.untyped_storage() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        made = tree_leaves(result)
        if not all(isinstance(x, torch.Tensor) for x in made) or shapes_by_contents(run, args):
            self.refused = self.refused or str(run)
            return result
        fresh = [] if schema.is_mutable else [x for x in made if id_of(x) not in given]
        if len({id_of(x) for x in fresh}) == len(fresh):
            for x in fresh:
                self._allocated(x)
        self._held |= {key: storage for key, storage in given.items() if self._own(storage) is None}
        if schema.is_mutable or fresh:
            tensors = args, kwargs, made if fresh else []
            self._parts.append(_Computed(run, *tree_map_only(torch.Tensor, self._later, tensors)))
        return result

    def _own(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """The block that this is; None if it is none."""
        return next((one for one in self._blocks[storage.nbytes()] if one._cdata == storage._cdata), None)

    def _later(self, x: torch.Tensor) -> Any:
        """``x``, or a function that makes it if it lies in a block."""
        block = self._own(x.untyped_storage())
        return x if block is None else partial(_tensor, block, x.dtype, x.storage_offset(), x.size(), x.stride())

    def _allocated(self, made: torch.Tensor) -> torch.Tensor:
        """``made``, moved to a block that nothing else uses any longer, if there is one."""
        fresh = made.untyped_storage()
        blocks = self._blocks[fresh.nbytes()]
        for block in blocks:
            if torch._C._storage_Use_Count(block._cdata) == 1:
                block.copy_(fresh)
                return made.set_(block, made.storage_offset(), made.size(), made.stride())
        blocks.append(fresh)
        return made


class _Reads(TorchFunctionMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            self._recording.refused = self._recording.refused or func.__name__
        return func(*args, **(kwargs or {}))


class _Watch(TorchDispatchMode):
    def __init__(self, recording: Recording):
        super().__init__()
        self._recording = recording

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or PyTorch imports its compiler when the first operation runs: a second of a first decode step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._recording.computed(func, args, kwargs or {})


def shapes_by_contents(run: Any, args: tuple[Any, ...]) -> bool:
    """Whether the shape of the result follows from numbers in tensors."""
    if run is torch.ops.aten.index.Tensor:
        return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    return run in _BY_NUMBERS or torch.Tag.dynamic_output_shape in run.tags


def id_of(x: torch.Tensor | torch.UntypedStorage) -> int:
    """Names the memory of a tensor."""
    return (x.untyped_storage() if isinstance(x, torch.Tensor) else x)._cdata


def _tensor(block: torch.UntypedStorage, dtype: torch.dtype, *at: Any) -> torch.Tensor:
    """A tensor in a block, which does not count as a use of it: another recording may take the block."""
    if block.nbytes() == 0:
        return torch.empty(0, dtype=dtype).set_(block, *at)
    memory = (ctypes.c_byte * block.nbytes()).from_address(block.data_ptr())
    memory.block = block  # type: ignore[attr-defined]  # lives as long
    return torch.empty(0, dtype=dtype).set_(torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(), *at)


def _word(value: Any, kind: Any) -> int:
    """An argument as 8 bytes."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value or 0)


def _runner(part: _Kernels | _Computed) -> Callable[[], None]:
    if isinstance(part, _Computed):
        run, args, kwargs, into = tree_map_only(partial, lambda make: make(), tuple(part))

        def compute() -> None:
            made = run(*args, **kwargs)
            for old, new in zip(into, made if isinstance(made, (tuple, list)) else (made,), strict=False):
                old.copy_(new)

        return compute
    names = part.names
    words, count, replay = (ctypes.c_int64 * len(part.words))(*part.words), len(names), cpu.kernels().dsa_replay

    def run_kernels() -> None:
        if number := replay(words, count):
            raise IndexError(f"{names[number - 1]} has met slots, pages or experts that do not exist")

    return run_kernels
