"""What the layers of a running engine compute: the rows of requests at given positions, of all ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.parallel.group import Group
from dsa_engine.sampling_params import SamplingParams


class Piece(NamedTuple):
    """Rows of one forward pass of a layer."""

    step: int
    positions: torch.Tensor  # [n] int64
    values: torch.Tensor  # [n, ...]


# By request, layer and what it is: "h", the residual stream before the layer, at every position; at the wanted ones
# "attended" and "fed", what attention and the feed-forward part add to it, and "chosen", the positions selected.
Rows = dict[tuple[int, int, str], list[Piece]]


class Watch:
    """Collects rows of some layers while steps run eagerly; every rank makes one.

    Args:
        wanted: positions whose results are collected.
        ranks: all ranks, on the CPU.
    """

    def __init__(self, engine: Engine, layers: Iterable[int], wanted: Iterable[int], ranks: Group):
        self._ranks = ranks
        self._engine, self._layers, self._wanted = engine, list(layers), torch.tensor(sorted(wanted))
        self._rows: Rows = {}
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
            yield
        finally:
            hooks.remove(self._begin)
            for handle in handles:
                handle.remove()

    def take(self) -> Rows:
        """The rows of all ranks since the last call; every rank calls it."""
        mine, self._rows = self._rows, {}
        rows: Rows = {}
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
            self._rows.setdefault((request.id, layer, kind), []).append(Piece(self._step, at[rows], values))


def joined(pieces: Sequence[Piece], before: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions ``[n]``, ascending, and their values ``[n, ...]``; what was computed last counts.

    Args:
        before: values at the first positions, where the pieces have none.
    """
    end = 1 + max(int(piece.positions.max()) for piece in pieces)
    values = pieces[0].values.new_zeros(end, *pieces[0].values.shape[1:])
    known = torch.zeros(end, dtype=torch.bool)
    if before is not None:
        values[: len(before)], known[: len(before)] = before[:end], True
    for piece in sorted(pieces, key=lambda piece: piece.step):
        values[piece.positions], known[piece.positions] = piece.values, True
    return known.nonzero()[:, 0], values[known]


def run(
    engine: Engine, prompts: Iterable[Sequence[int]], max_tokens: int, *, reads: bool = True, preempt: bool = False
) -> list[Request]:
    """Generates greedily for prompts together, without the engine's loop; every rank calls it.

    Args:
        reads: whether the prefix cache is used.
        preempt: whether each request loses its pages once, when it has two tokens.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [engine.add(list(prompt), params) for prompt in prompts]
    for request in requests:
        request.reads_prefix_cache = reads
    while engine.has_work:
        engine.step()
        for request in requests if preempt else ():
            if len(request.output) >= 2 and not request.preemptions and request.finish_reason is None:
                engine.scheduler.preempt(request)
    if errors := [request.error for request in requests if request.error is not None]:
        raise RuntimeError(f"a request of the check failed: {errors[0]}")
    return requests
