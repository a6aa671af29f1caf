"""Counts on the device how often the tokens of this rank choose each expert, without a wait, in CUDA graphs too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts.loads_file import ExpertLoads
from dsa_engine.parallel.group import Group


class LoadCounter:
    """The counts of some layers. Every row is counted on the rank that routes it, so sums over ranks have each token
    once; drafts that are rejected count, padding does not.

    :meth:`take`, :meth:`total` and :meth:`forget` are called by every rank after the same step.

    Args:
        model: its name, for the loads.
        layers: numbers of the layers, ascending.
        experts: number of logical experts of each, without a shared one.
        group: the ranks whose counts are added.
    """

    def __init__(self, model: str, layers: Sequence[int], experts: int, group: Group, device: torch.device):
        self._model, self._layers, self._group = model, tuple(layers), group
        # The first column is for −1.
        self._counts = torch.zeros(len(self._layers), 1 + experts, dtype=torch.int64, device=device)
        self._taken = torch.zeros(len(self._layers), experts, dtype=torch.int64, device=device)  # all ranks together

    def counts(self, layer: int) -> torch.Tensor:
        """int64 ``[1 + experts]``, to which :func:`count_topk_ids` adds."""
        return self._counts[self._layers.index(layer)]

    def take(self) -> ExpertLoads:
        """The loads of all ranks together since the last call, the same on every rank; the host waits for the steps
        before."""
        now = self._of_ranks()
        loads = self._loads(download(now - self._taken))
        self._taken.copy_(now)
        return loads()

    def total(self) -> Callable[[], ExpertLoads]:
        """Starts to read the loads of all ranks together since :meth:`forget`, the same on every rank.

        Returns:
            a function that waits for them, but for nothing later.
        """
        return self._loads(download(self._of_ranks()))

    def forget(self) -> None:
        """Begins anew."""
        self._counts.zero_()
        self._taken.zero_()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is counted in this block is forgotten."""
        before = self._counts.clone()
        yield
        self._counts.copy_(before)

    def _of_ranks(self) -> torch.Tensor:
        """int64 ``[layers, experts]``."""
        return self._group.all_gather(self._counts[None]).sum(dim=0)[:, 1:].contiguous()

    def _loads(self, counts: Callable[[], list[list[float]]]) -> Callable[[], ExpertLoads]:
        return lambda: ExpertLoads(self._model, self._layers, tuple(map(tuple, counts())))


def count_topk_ids(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds ``topk_ids [T, k]``, −1 for none, to ``counts``. Sums of integers do not depend on their order."""
    numbers = topk_ids.flatten().long() + 1
    counts.scatter_add_(0, numbers, torch.ones_like(numbers))
