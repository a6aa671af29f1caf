"""Loads of experts: their file, and their count.

The file is JSON, one list of loads for each layer with routed experts.

    {"version": 1, "model": "…", "layers": [3, 4, …], "loads": [[120.0, 80.0, …], …]}

Loads are token-expert pairs, or anything in proportion to them. Keys that are not named here are left alone. They are
counted on the device, where the tokens of a rank choose experts, without a wait, in CUDA graphs too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dsa_engine.config.checks import is_number
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.group import Group

VERSION = 1


@dataclass(frozen=True)
class ExpertCounts:
    """Loads of all logical experts of some layers. A layer without any load counts as one with equal loads."""

    model: str  # its name
    layers: tuple[int, ...]  # ascending
    loads: tuple[tuple[float, ...], ...]  # [layers, experts], at least 0

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ValueError(f"layers must be ascending numbers from 0, not {list(self.layers)!r:.80}")
        if len(self.loads) != len(self.layers) or len({len(loads) for loads in self.loads}) != 1:
            sizes = [len(loads) for loads in self.loads]
            raise ValueError(f"loads must be as many numbers for each of {len(self.layers)} layers, not {sizes!r:.80}")
        for layer, loads in zip(self.layers, self.loads, strict=True):
            for expert, load in enumerate(loads):
                if not is_number(load) or load < 0:
                    raise ValueError(f"load of expert {expert} in layer {layer} must be at least 0, not {load!r:.80}")

    @property
    def experts(self) -> int:
        return len(self.loads[0])

    def of_layer(self, layer: int) -> tuple[float, ...] | None:
        """The loads of a layer; None if the file does not have it, or all are 0: equal loads."""
        loads = self.loads[self.layers.index(layer)] if layer in self.layers else ()
        return loads if any(loads) else None

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ExpertCounts:
        """Reads a file; ``ValueError`` with its name if it is missing or no such file."""
        try:
            value = json.loads(Path(path).read_text(encoding="utf-8"))
            if value["version"] != VERSION:
                raise ValueError(f"version {value['version']!r:.80} is not {VERSION}; count the loads again")
            return cls(str(value["model"]), tuple(value["layers"]), tuple(map(tuple, value["loads"])))
        except OSError as error:
            raise ValueError(f"expert_loads: cannot read {path}: {error.strerror or error}") from error
        except (ValueError, TypeError, KeyError) as error:
            wanted = "it must hold a JSON object with version, model, layers, loads"
            raise ValueError(f"expert_loads: cannot read {path}: {error!r}; {wanted}") from error

    def text(self) -> str:
        """What a file holds."""
        value = {"version": VERSION, "model": self.model, "layers": self.layers, "loads": self.loads}
        return json.dumps(value) + "\n"


class ExpertCounter:
    """The counts of some layers. Every row is counted on the rank that routes it, so sums over ranks have each token
    once; drafts that are rejected count, padding does not.

    :meth:`take`, :meth:`total` and :meth:`forget` are called by every rank of ``group`` after the same step.
    ``experts``: number of logical experts of a layer, without a shared one.
    """

    def __init__(self, model: str, layers: Sequence[int], experts: int, group: Group, device: torch.device):
        self._model, self._layers, self._group = model, tuple(layers), group
        # The first column is for −1.
        self._counts = torch.zeros(len(self._layers), 1 + experts, dtype=torch.int64, device=device)
        self._taken = torch.zeros(len(self._layers), experts, dtype=torch.int64, device=device)  # all ranks together

    def counts(self, layer: int) -> torch.Tensor:
        """int64 ``[1 + experts]``, to which :func:`count_topk_ids` adds."""
        return self._counts[self._layers.index(layer)]

    def take(self) -> ExpertCounts:
        """The loads of all ranks together since the last call, the same on every rank; the host waits for the steps
        before."""
        now = self._of_ranks()
        loads = self._loads(download(now - self._taken))
        self._taken.copy_(now)
        return loads()

    def total(self) -> Callable[[], ExpertCounts]:
        """Starts to read the loads of all ranks together since :meth:`forget`, the same on every rank; returns a
        function that waits for them, but for nothing later."""
        return self._loads(download(self._of_ranks()))

    def forget(self) -> None:
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

    def _loads(self, counts: Callable[[], list[list[float]]]) -> Callable[[], ExpertCounts]:
        return lambda: ExpertCounts(self._model, self._layers, tuple(map(tuple, counts())))


def count_topk_ids(topk_ids: torch.Tensor, counts: torch.Tensor) -> None:
    """Adds ``topk_ids [T, k]``, −1 for none, to ``counts``. Sums of integers do not depend on their order."""
    numbers = topk_ids.flatten().long() + 1
    counts.scatter_add_(0, numbers, torch.ones_like(numbers))
