"""What every stub checks of tensors, and the record of calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

BF16, F32, I32, E4M3, U8 = torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn, torch.uint8
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]

calls: list[Call] = []  # all calls of stubs, in order


class Refused(Exception):
    """What the library would not take."""


def need(condition: object, what: str) -> None:
    if not condition:
        raise Refused(what)


def tensor(
    name: str, x: Any, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int | None, contiguous: bool = False
) -> None:
    """dtype, shape (None: any size), last dimension or all of it contiguous, and what TMA needs of a matrix: an address
    and strides of whole 16 bytes."""
    need(isinstance(x, torch.Tensor), f"{name} is no tensor")
    need(x.dtype in (dtype if isinstance(dtype, tuple) else (dtype,)), f"{name} is {x.dtype}")
    need(x.dim() == len(shape), f"{name} has {x.dim()} dimensions")
    fits = all(wanted in (None, size) for wanted, size in zip(shape, x.shape, strict=True))
    need(fits, f"{name} is {list(x.shape)}, not {list(shape)}")
    need(x.stride(-1) == 1 or x.shape[-1] == 1, f"{name}: the last dimension has stride {x.stride(-1)}")
    need(not contiguous or x.is_contiguous(), f"{name} is not contiguous: {x.stride()}")
    if x.dim() > 1 and x.dtype != I32:  # whole numbers are read one by one
        need(x.storage_offset() * x.itemsize % 16 == 0, f"{name} begins at element {x.storage_offset()}")
        need(x.stride(0) * x.itemsize % 16 == 0, f"{name}: rows are {x.stride(0) * x.itemsize} bytes apart")


def stub(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = compute(*args, **kwargs)
        calls.append((call, args, kwargs))
        return result

    return call


def has_no_values(x: torch.Tensor) -> bool:
    return isinstance(x, FakeTensor)
