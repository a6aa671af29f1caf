"""What the layers of a running engine compute: the rows of requests at given positions, of all ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.parallel.group import Group

Piece = tuple[int, torch.Tensor, torch.Tensor]  # of a forward pass: its number, positions [n], values [n, ...]
# By request, layer and what it is: "h", the residual stream before the layer, at every position; at the wanted ones
# "attended" and "fed", what attention and the feed-forward part add to it, "chosen", the positions that the indexer
# selected, and "experts", those that the router chose.
Rows = dict[tuple[int, int, str], list[Piece]]


class Watch:
    """Collects rows of some layers while steps run eagerly; every rank makes one.

    ``wanted``: positions whose results are collected; ``ranks``: all, on the CPU.
    """

    def __init__(self, engine: Engine, layers: Iterable[int], wanted: Iterable[int], ranks: Group):
        self._engine, self._layers, self._wanted = engine, list(layers), torch.tensor(sorted(wanted))
        self._ranks, self._rows = ranks, Rows()
        self._step, self._plan = 0, StepPlan.of([], 0, 1, engine.config)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Collects what the steps within compute."""
        handles, hooks = [], self._engine.runner.hooks
        hooks.append(self._begin)
        try:
            for number in self._layers:
                layer: Any = self._engine.model.layers[number]
                handles.append(layer.register_forward_pre_hook(self._before))
                handles.append(layer.attention.register_forward_hook(self._attended))
                fed = layer.mlp if layer.moe is None else layer.moe
                handles.append(fed.register_forward_hook(lambda _, __, out, number=number: self._fed(number, out)))
                if layer.moe is not None:
                    hook = partial(self._routed, number)
                    handles.append(layer.moe.router.register_forward_hook(hook))
            yield
        finally:
            hooks.remove(self._begin)
            for handle in handles:
                handle.remove()

    def take(self) -> Rows:
        """The rows of all ranks since the last call; every rank calls it."""
        mine, self._rows, rows = self._rows, {}, Rows()
        for theirs in self._ranks.all_gather_object(mine):
            for key, pieces in theirs.items():
                rows.setdefault(key, []).extend(pieces)
        return rows

    def _begin(self, plan: StepPlan) -> None:
        self._plan, self._step = plan, self._step + 1

    def _before(self, layer: Any, args: tuple[Any, ...]) -> None:
        delta, residual, *_ = args
        h = sum((part.float() for part in (*delta, residual) if part is not None), torch.zeros(()))
        self._collect("h", layer.attention.layer, h.to(self._engine.dtype))

    def _attended(self, attention: Any, args: tuple[Any, ...], out: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        self._collect("attended", attention.layer, out[0])
        if out[1] is not None:
            self._collect("chosen", attention.layer, out[1], first=args[1].first_sparse)

    def _routed(self, layer: int, _: Any, __: Any, chosen: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._collect("experts", layer, chosen[0])

    def _fed(self, layer: int, out: torch.Tensor | Generator[str, None, list[torch.Tensor]]) -> Any:
        if isinstance(out, torch.Tensor):
            return self._collect("fed", layer, out)

        def watched() -> Generator[str, None, list[torch.Tensor]]:
            parts = yield from out
            self._collect("fed", layer, torch.stack([part.float() for part in parts]).sum(0))
            return parts

        return watched()

    def _collect(self, kind: str, layer: int, x: torch.Tensor, first: int = 0) -> None:
        own, size = self._plan.own, self._engine.cache.page_size
        for s in own.sparse_mqa if kind == "chosen" else own.segments:
            at = torch.arange(s.start, s.end)
            rows = at >= 0 if kind == "h" else torch.isin(at, self._wanted)
            if not bool(rows.any()):
                continue
            values = x[s.row - first : s.row - first + s.length][rows.to(x.device)].cpu()
            request = own.chunks[s.sequence].request
            if kind == "chosen":  # slots of the cache -> positions
                number = torch.full((self._engine.cache.pages,), -1)
                number[torch.tensor(request.pages)] = torch.arange(len(request.pages))
                values = torch.where(values < 0, -1, number[values.clamp(min=0) // size] * size + values % size)
            self._rows.setdefault((request.id, layer, kind), []).append((self._step, at[rows], values))


def joined(pieces: Sequence[Piece], before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[n]``, ascending, and their values ``[n, ...]``; what was computed last counts. ``before``: values at
    the first positions, where the pieces have none."""
    pieces = sorted(pieces, key=lambda piece: piece[0])
    if before is not None:
        pieces = [(0, torch.arange(len(before)), before), *pieces]
    end = 1 + max(int(at.max()) for _, at, _ in pieces if len(at))
    values, known = pieces[-1][2].new_zeros(end, *pieces[-1][2].shape[1:]), torch.zeros(end, dtype=torch.bool)
    for _, at, some in pieces:
        values[at], known[at] = some, True
    return known.nonzero()[:, 0], values[known]
