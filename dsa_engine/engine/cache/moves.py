"""The pages that one step moves: which, in what order, and how they are packed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class PageCopy(NamedTuple):
    """A page of all layers, from the device to a slot of host memory or back."""

    to_host: bool
    page: int  # number in the pools
    slot: int  # number in host memory


@dataclass
class PageMoves:
    """Everything that one step moves on this rank before its layers read pages.

    Attributes:
        copies: take effect in this order; pages and slots may occur several times.
        sends: for each rank of the context-parallel group, the pages to send to it, as they are after the copies. A
            page may occur several times.
        receives: for each rank of the group, the pages to fill with what it sends, in the same order. A page occurs
            once.
        exchanges: whether any rank of the group sends; then all of them take part in one collective a layer.
    """

    copies: list[PageCopy] = field(default_factory=list)
    sends: list[list[int]] = field(default_factory=list)
    receives: list[list[int]] = field(default_factory=list)
    exchanges: bool = False


class CopyRun(NamedTuple):
    """Copies of one direction that do not depend on each other, as (slot, page), sorted."""

    to_host: bool
    pairs: list[tuple[int, int]]


def independent_runs(copies: Iterable[PageCopy]) -> list[CopyRun]:
    """Orders copies into as few runs as dependencies between pages and slots allow: run after run they have the effect
    of the copies one after another.

    Runs to the host and back alternate: pages that leave and others that take their places are two runs.
    """
    runs: list[CopyRun] = []
    # The last run that read or wrote a page (False, page) or a slot (True, slot); -1: none.
    read: dict[tuple[bool, int], int] = {}
    written: dict[tuple[bool, int], int] = {}
    for to_host, page, slot in copies:
        source, target = ((False, page), (True, slot)) if to_host else ((True, slot), (False, page))
        number = 1 + max(written.get(source, -1), written.get(target, -1), read.get(target, -1))
        number += (number % 2 == 0) != to_host  # even runs go to the host
        while len(runs) <= number:
            runs.append(CopyRun(len(runs) % 2 == 0, []))
        runs[number].pairs.append((slot, page))
        read[source] = max(number, read.get(source, -1))
        written[target] = number
    for run in runs:
        run.pairs.sort()
    return [run for run in runs if run.pairs]


def neighbours(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Runs of sorted pairs in which both numbers are consecutive, as (first number of each, count)."""
    spans: list[tuple[int, int, int]] = []
    for one, other in pairs:
        first, second, count = spans[-1] if spans else (0, 0, -1)
        if (one, other) == (first + count, second + count):
            spans[-1] = first, second, count + 1
        else:
            spans.append((one, other, 1))
    return spans


def pack(pools: Sequence[torch.Tensor], pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Copies pages of a layer into ``rows [n, words]``, a page's words of all pools side by side."""
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        torch.index_select(pool, 0, pages, out=part)


def unpack(pools: Sequence[torch.Tensor], pages: torch.Tensor, rows: torch.Tensor) -> None:
    """Fills pages of a layer with what :func:`pack` has made."""
    for pool, part in zip(pools, _columns(pools, rows), strict=True):
        pool.index_copy_(0, pages, part)


def _columns(pools: Sequence[torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return rows.split([pool.shape[1] for pool in pools], dim=1)
