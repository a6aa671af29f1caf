"""Bytes that a process sends to others, counted where PyTorch dispatches collectives, also those of libraries."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class SentBytes(TorchDispatchMode):
    """Counts payload inside the context, in ``total``.

    An all-gather sends its input to each other rank, an all-to-all its input without this rank's own part, a message
    its tensors. The bytes that an algorithm sends over a wire may differ.

    Args:
        ranks: number of ranks of the group.
    """

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.total = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name.startswith("c10d::"):
            self.total += self._payload(name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _payload(self, name: str, args: Any) -> int:
        if name == "_allgather_base_":
            return args[1].nbytes * (self.ranks - 1)
        if name == "alltoall_base_":
            if args[3] or args[4]:
                raise NotImplementedError("an all-to-all of unequal parts is not counted yet")
            return args[1].nbytes // self.ranks * (self.ranks - 1)
        if name == "send":
            return sum(tensor.nbytes for tensor in args[0])
        if name in ("recv_", "barrier"):
            return 0
        raise NotImplementedError(f"the bytes of {name} are not counted yet")
