"""``x[…]``, ``int(x)``, ``copy_`` and others ``x.tolist()`` for tensors on a fake device.

PyTorch's own implementations use a device guard before they dispatch, which a build without CUDA does not have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

_NUMBERS: dict[Any, Any] = {
    torch.Tensor.item: lambda x: x,
    torch.Tensor.__int__: int,
    torch.Tensor.__float__: float,
    torch.Tensor.__bool__: bool,
    torch.Tensor.__index__: int,
}


_DISPATCHED: dict[Any, Any] = {
    torch.Tensor.copy_: torch.ops.aten.copy_.default,
    torch.Tensor.contiguous: torch.ops.aten.contiguous.default,
    torch.Tensor.__invert__: torch.ops.aten.bitwise_not.default,
}


class Indexing(TorchFunctionMode):
    """Implements them with operations that are dispatched like any other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], FakeTensor):
            view, tensors = _basic(*args)
            return torch.ops.aten.index.Tensor(view, tensors) if tensors else view
        if func is torch.Tensor.__setitem__ and isinstance(args[0], FakeTensor):
            return _set(*args)
        if func in _DISPATCHED:
            return _DISPATCHED[func](*args, **(kwargs or {}))
        if func in _NUMBERS and isinstance(args[0], FakeTensor):
            return _NUMBERS[func](torch.ops.aten._local_scalar_dense.default(args[0]))
        if func is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            return torch.ops.aten._to_copy.default(args[0], device=torch.device("cpu")).tolist()
        return func(*args, **(kwargs or {}))


def _basic(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """The view that numbers, slices, None and … select, and the tensors that index its dimensions."""
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(i is not None and i is not Ellipsis for i in index)
    tensors: list[torch.Tensor | None] = []
    dim, skipped = 0, x.dim() - taken
    for i in index:
        if i is Ellipsis:
            dim += skipped
        elif i is None:
            x, dim = torch.ops.aten.unsqueeze.default(x, dim), dim + 1
        elif isinstance(i, slice):
            x = torch.ops.aten.slice.Tensor(x, dim, i.start, i.stop, 1 if i.step is None else i.step)
            dim += 1
        elif isinstance(i, int):
            x = torch.ops.aten.select.int(x, dim, i)
        else:
            at = i if isinstance(i, torch.Tensor) else torch.tensor(i, device=x.device)
            tensors += [None] * (dim - len(tensors)) + [at]
            dim += 1
    return x, tensors


def _set(x: torch.Tensor, index: Any, value: Any) -> None:
    view, tensors = _basic(x, index)
    if isinstance(value, torch.Tensor) and not tensors:
        torch.ops.aten.copy_.default(view, value)
    elif not tensors:
        view.fill_(value)
    else:
        # A number is copied to the device from pageable memory.
        values = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=x.dtype, device=x.device)
        torch.ops.aten.index_put_.default(view, tensors, values)
