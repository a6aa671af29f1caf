"""A record of the collectives of a group, with their bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dsa_engine.parallel.group import Group


class Collective(NamedTuple):
    """One collective as one rank of its group sees it.

    ``sent`` and ``received`` are payload bytes to and from every rank of the group, 0 for the rank itself. For
    "all_gather" and "reduce_scatter" they are the size of one rank's part. "send" and "recv" are the two sides of a
    point-to-point message.
    """

    kind: str
    ranks: tuple[int, ...]
    rank: int  # this one
    sent: tuple[int, ...]
    received: tuple[int, ...]
    asynchronous: bool = False  # issued before other work and waited for after it


def record(*groups: Group) -> list[Collective]:
    """Writes down the collectives of groups from now on, in one list, which is also ``log`` of each."""
    log: list[Collective] = []
    for group in groups:
        _record(group, log)
    return log


def _record(group: Group, log: list[Collective]) -> None:
    within = False  # a transport of emulated ranks calls another one

    def each(counts: int | Sequence[int]) -> tuple[int, ...]:
        sizes = [counts] * group.size if isinstance(counts, int) else counts
        return tuple(0 if rank == group.index else n for rank, n in enumerate(sizes))

    def only(peer: int, nbytes: int) -> list[int]:
        return [nbytes * (rank == peer) for rank in range(group.size)]

    def pairs(rows: torch.Tensor, send: Sequence[int] | None, receive: Sequence[int] | None) -> tuple[Any, Any]:
        if send is None or receive is None:
            return (rows.nbytes // group.size,) * 2
        one = rows.element_size() * math.prod(rows.shape[1:])
        return [n * one for n in send], [n * one for n in receive]

    # By transport: the kind, the bytes from its arguments, and whether it is asynchronous.
    kinds: dict[str, tuple[str, Callable[..., tuple[Any, Any]], Callable[..., bool]]] = {
        "_start_gather": ("all_gather", lambda rows, *_: (rows.nbytes,) * 2, lambda _, later, *__: later),
        "_start_reduce": (
            "reduce_scatter", lambda rows, _: (rows.nbytes // group.size,) * 2, lambda _, later: later,
        ),
        "_exchange": ("all_to_all", pairs, lambda *_: False),
        "_start_exchange": ("all_to_all", lambda rows, _, *counts: pairs(rows, *counts), lambda *_: True),
        "_send": ("send", lambda rows, to: (only(to, rows.nbytes), 0), lambda *_: False),
        "_recv": ("recv", lambda into, source: (0, only(source, into.nbytes)), lambda *_: False),
    }  # fmt: skip

    def watched(name: str) -> Callable[..., Any]:
        transport, (kind, size, later) = getattr(group, name), kinds[name]

        def run(*given: Any) -> Any:
            nonlocal within
            if within:
                return transport(*given)
            sent, received = map(each, size(*given))
            log.append(Collective(kind, group.ranks, group.ranks[group.index], sent, received, later(*given)))
            within = True
            try:
                return transport(*given)
            finally:
                within = False

        return run

    vars(group).update({name: watched(name) for name in kinds}, log=log)
