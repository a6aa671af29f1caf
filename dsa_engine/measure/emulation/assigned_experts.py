"""Expert choices of the tokens of all ranks, for runs in which the router's choices mean nothing.

An emulated rank knows only its own tokens, and random weights route them arbitrarily. So the choices of all ranks'
tokens are assigned, from the number of tokens of each rank and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F

from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.measure.emulation.routing import balanced_choices, weighted_choices
from dsa_engine.measure.emulation.stand_ins import stand_in
from dsa_engine.parallel.experts.placement import ExpertPlacement

Rows = tuple[int, ...]


@dataclass(frozen=True)
class StepChoices:
    """Expert choices of all tokens of a step, in rank order."""

    physical: torch.Tensor  # [tokens of all ranks, k] int32
    tokens: tuple[int, ...]  # number of tokens of every rank
    rank: int
    placement: ExpertPlacement
    rows: tuple[Rows, ...] | None = None  # rows of every rank's tokens; None: the first rows

    def own(self, padded: int) -> torch.Tensor:
        """Physical experts ``[padded, k]`` of this rank's rows; −1 for padding."""
        return self._among(padded)[self.rank]

    def gathered(self, max_rows: int) -> torch.Tensor:
        """``[ranks · max_rows, k]``: the choices of all ranks' rows, counted within this rank's experts; −1 for
        padding."""
        return self.placement.local(torch.cat(self._among(max_rows)), self.rank)

    def _among(self, rows: int) -> list[torch.Tensor]:
        """For every rank ``[rows, k]``: the choices of its tokens, −1 for other rows."""
        parts = self.physical.split(self.tokens)
        if self.rows is None:
            return [F.pad(part, (0, 0, 0, rows - len(part)), value=-1) for part in parts]
        indices = [upload(torch.tensor(one, dtype=torch.int64), self.physical.device) for one in self.rows]
        empty = self.physical.new_full((rows, self.physical.shape[1]), -1)
        return [empty.index_copy(0, index, part) for index, part in zip(indices, parts, strict=True)]

    @cached_property
    def arriving(self) -> tuple[torch.Tensor, list[int]]:
        """The choices ``[R, k]`` of the tokens that come to this rank's experts, counted within these, and the number
        of tokens from each rank."""
        local = self.placement.local(self.physical, self.rank)
        mine = (local >= 0).any(dim=1)
        return local[mine], [int(part.sum()) for part in mine.split(self.tokens)]

    @cached_property
    def max_served(self) -> int:
        """Number of choices that the most loaded rank serves."""
        return int(self.placement.rank_of[self.physical.flatten().long()].bincount(minlength=1).max())


@dataclass
class _Buffer:
    values: torch.Tensor
    step: StepChoices  # the step whose choices it holds
    captured: bool = False  # a CUDA graph reads it, so it is updated in place


class AssignedExperts:
    """The choices in the current step, the same for every layer.

    Args:
        placement: the experts of each rank.
        rank: this rank.
        loads: relative load of every logical expert; None: equal loads.
        shared: whether the last expert is the shared one, which every token chooses; it has no load in ``loads``.
    """

    def __init__(
        self, placement: ExpertPlacement, rank: int, loads: Sequence[float] | None = None, shared: bool = False
    ):
        self._placement = placement
        self._rank = rank
        self._loads = loads
        self._shared = shared
        self._limits = (1, 1)
        self._tokens: tuple[int, ...] = ()
        self._padded: dict[int, tuple[Rows, ...]] = {}
        self._step: StepChoices | None = None
        self._buffers: dict[tuple[str, int, int, int, torch.device], _Buffer] = {}

    def limit(self, groups: int, top_groups: int) -> None:
        """Limits a token's choices to ``top_groups`` of ``groups`` consecutive groups of experts, as DeepSeek-V3's
        routing does; without ``loads``, and if they divide evenly."""
        self._limits = (groups, top_groups)
        self._step = None

    def begin_step(self, tokens: Sequence[int], padded: Mapping[int, Sequence[Rows]] | None = None) -> None:
        """Sets the number of tokens that each rank has in the next step.

        Before the first call, or if this rank has fewer rows than that, all ranks are assumed to have as many tokens as
        this one has rows. If it has more, the remaining rows are padding without experts.

        Args:
            padded: for padded passes, by their number of rows: the rows of every rank that are tokens. In other passes
                the first rows are.
        """
        now = tuple(tokens), {rows: tuple(by_rank) for rows, by_rank in (padded or {}).items()}
        if now == (self._tokens, self._padded):
            return
        self._tokens, self._padded = now
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if buffer.captured}
        for kind, rows, max_rows, top_k, device in self._buffers:
            # Other buffers belong to graphs of smaller steps.
            if rows in self._padded or (tokens[self._rank] <= rows and max(tokens) <= max_rows):
                if kind == "own":
                    self.own(rows, top_k, device)
                else:
                    self.gathered(rows, max_rows, top_k, device)

    def own(self, padded: int, top_k: int, device: torch.device) -> torch.Tensor:
        """Physical experts, int32 ``[padded, top_k]``, of this rank's tokens, then −1.

        Raises:
            ValueError: there is not one load for each expert, or an expert would get more choices than there are
                tokens.
        """
        step = self.choices(padded, top_k, device)
        return self._buffered(("own", padded, padded, top_k, device), step, lambda: step.own(padded))

    def gathered(self, padded: int, max_rows: int, top_k: int, device: torch.device) -> torch.Tensor:
        """int32 ``[ranks · max_rows, top_k]``: every rank's choices, counted within this rank's experts; −1 for other
        ranks' experts and for padding. This rank has ``padded`` rows."""
        step = self.choices(padded, top_k, device)
        return self._buffered(("gathered", padded, max_rows, top_k, device), step, lambda: step.gathered(max_rows))

    @property
    def step(self) -> StepChoices:
        """The choices of the last call of :meth:`own`."""
        assert self._step is not None
        return self._step

    def choices(self, padded: int, top_k: int, device: torch.device) -> StepChoices:
        """The choices in a step in which this rank has ``padded`` rows, padding included."""
        tokens, ranks, rows = self._tokens, self._placement.ranks, self._padded.get(padded)
        if rows is not None:
            tokens = tuple(map(len, rows))
        elif len(tokens) != ranks or tokens[self._rank] > padded:
            tokens = (padded,) * ranks
        last = self._step
        wanted = (tokens, rows, top_k, device)
        if last is None or (last.tokens, last.rows, last.physical.shape[1], last.physical.device) != wanted:
            physical = stand_in(("choices", tokens, top_k), lambda: self._chosen(sum(tokens), top_k, device))
            self._step = StepChoices(physical, tokens, self._rank, self._placement, rows)
        assert self._step is not None
        return self._step

    def _chosen(self, tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
        """Physical experts ``[tokens, top_k]``."""
        experts, shared = self._placement.experts - self._shared, int(self._shared)
        top_k -= shared
        if self._loads is None:
            logical = balanced_choices(tokens, top_k, experts, *self._limits, device)
        else:
            logical = weighted_choices(tokens, top_k, experts, self._loads, device)
        return self._placement.to_physical(F.pad(logical, (0, shared), value=experts))

    def _buffered(
        self, name: tuple[str, int, int, int, torch.device], step: StepChoices, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = _Buffer(stand_in((*name, step.tokens), make), step)
        elif buffer.step is not step:
            buffer.values.copy_(make())
            buffer.step = step
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            buffer.captured = True
        return buffer.values
