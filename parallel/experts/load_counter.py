"""Counts on the device how often the tokens of this rank choose each expert, without a wait, in CUDA graphs too."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts.loads_file import ExpertLoads
from dsa_engine.parallel.group import Group


class LoadCounter:
    """The counts of some layers since the last :meth:`take`.

    Args:
        model: its name, for the loads.
        layers: numbers of the layers, ascending.
        experts: number of logical experts of each, without a shared one.
        group: the ranks whose counts are added.
    """

    def __init__(self, model: str, layers: Sequence[int], experts: int, group: Group, device: torch.device):
        self._model, self._layers, self._group = model, tuple(layers), group
        # The first column is for choices that are none.
        self._counts = torch.zeros(len(self._layers), 1 + experts, dtype=torch.int64, device=device)

    def counts(self, layer: int) -> torch.Tensor:
        """int64 ``[1 + experts]``, to which :func:`count_choices` adds."""
        return self._counts[self._layers.index(layer)]

    def take(self) -> ExpertLoads:
        """The loads of all ranks together since the last call, the same on every rank; every rank calls it, and the
        host waits for the steps before."""
        of_ranks = download(self._group.all_gather(self._counts[None]).sum(dim=0)[:, 1:])
        self._counts.zero_()
        return ExpertLoads(self._model, self._layers, tuple(map(tuple, of_ranks())))


def count_choices(experts: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds choices ``experts [T, k]``, −1 for none, to ``counts``. Sums of integers do not depend on their order."""
    numbers = experts.flatten().long() + 1
    counts.scatter_add_(0, numbers, torch.ones_like(numbers))
