"""What the layers of a running engine compute: the rows of requests at given positions, of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.sampling.selections import named_pages
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.model.forward_batch import ForwardBatch
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
        hooks, watched = self._engine.runner.hooks, list[Any]()
        hooks.append(self._begin)

        def watch(part: Any, seen: Callable[..., Any]) -> None:
            part.forward = partial(seen, part.forward)  # not a hook of PyTorch: layers are not run by `Module.__call__`
            watched.append(part)

        try:
            for number in self._layers:
                layer: Any = self._engine.model.layers[number]
                watch(layer, partial(self._before, number))
                watch(layer.attention, partial(self._attended, number))
                watch(layer.mlp if layer.moe is None else layer.moe, partial(self._fed, number))
                if layer.moe is not None:
                    watch(layer.moe.router, partial(self._routed, number))
            yield
        finally:
            hooks.remove(self._begin)
            for part in watched:
                del part.forward

    def take(self) -> Rows:
        """The rows of all ranks since the last call; every rank calls it."""
        mine, self._rows, rows = self._rows, {}, Rows()
        for theirs in self._ranks.all_gather_object(mine):
            for key, pieces in theirs.items():
                rows.setdefault(key, []).extend(pieces)
        return rows

    def _begin(self, plan: StepPlan) -> None:
        self._plan, self._step = plan, self._step + 1

    def _before(self, layer: int, forward: Callable[..., Any], *given: Any) -> Any:
        delta, residual, *_ = given
        h = sum((part.float() for part in (*delta, residual) if part is not None), torch.zeros(()))
        self._collect("h", layer, h.to(self._engine.dtype))
        return forward(*given)

    def _attended(self, layer: int, forward: Callable[..., Any], *given: Any) -> Any:
        out, batch = forward(*given), given[1]
        self._collect("attended", layer, out[0])
        if (chosen := out[1]) is not None:
            if batch.shards is not None:  # what lies here of all ranks' rows -> positions of this rank's, of all ranks
                here = torch.stack([batch.shards.positions_of(row, slots) for row, slots in enumerate(chosen)])
                parts = batch.shards.group.all_to_all(here).view(self._engine.mesh.dcp.size, -1, here.shape[1])
                chosen = parts.transpose(0, 1).flatten(1)
            self._collect("chosen", layer, chosen, batch)
        return out

    def _routed(self, layer: int, forward: Callable[..., Any], *given: Any) -> Any:
        chosen = forward(*given)
        self._collect("experts", layer, chosen[0])
        return chosen

    def _fed(self, layer: int, forward: Callable[..., Any], *given: Any) -> Any:
        out = forward(*given)
        if isinstance(out, torch.Tensor):
            self._collect("fed", layer, out)
            return out

        def parts() -> Generator[str, None, list[torch.Tensor]]:
            of_experts = yield from out
            self._collect("fed", layer, torch.stack([part.float() for part in of_experts]).sum(0))
            return of_experts

        return parts()

    def _collect(self, kind: str, layer: int, x: torch.Tensor, batch: ForwardBatch | None = None) -> None:
        """``batch``: ``x`` are slots that its sparse rows have selected."""
        own, size, first = self._plan.own, self._engine.cache.page_size, 0 if batch is None else batch.first_sparse
        for s in own.segments if batch is None else own.sparse_mqa:
            at = torch.arange(s.start, s.end)
            rows = at >= 0 if kind == "h" else torch.isin(at, self._wanted)
            if not bool(rows.any()):
                continue
            values = x[s.row - first : s.row - first + s.length][rows.to(x.device)].cpu()
            request = own.chunks[s.sequence].request
            if batch is not None:  # slots -> positions
                pages = torch.from_numpy(named_pages(request, s.end, batch, size)).long()
                number = torch.full((1 + max(int(pages.max()), int(values.max()) // size),), -1)
                number[pages] = torch.arange(len(pages))
                values = torch.where(values < 0, -1, number[values.clamp(min=0) // size] * size + values % size)
                columns = self._engine.mesh.dcp.size * self._engine.config.index_topk  # in every step
                values = pad(values, (0, columns - values.shape[1]), value=-1)
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
