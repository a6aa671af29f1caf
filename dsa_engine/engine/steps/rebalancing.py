"""Loads of experts while requests run: counted, written to a file, and experts moved between ranks by them.

Experts move by the loads of the steps since the last time. After every launched step the engine gives a *turn*, on all
ranks after the same step. A turn does one of three things: nothing; it plans as many layers as there are ranks, each
rank one; or it moves some experts and changes the tables of their layers. All of it is given to the device between two
steps, in order, so it may be launched ahead of results: the step before still sees the old weights and tables, the step
after sees the new ones. Weights and tables stay where they are in memory, so CUDA graphs stay valid.
Within a layer experts move in rounds; after each, every expert lies on a rank and the tables say where.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain
from pathlib import Path

import torch

from dsa_engine.engine.requests.request import Chunk
from dsa_engine.kernels.runtime.transfer import download, upload
from dsa_engine.model.model import Model
from dsa_engine.model.moe import MoE
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.counts import ExpertCounter, ExpertCounts
from dsa_engine.parallel.experts.movement import after_round, expert_bytes, move_round, plan_movement
from dsa_engine.parallel.experts.placement import Held
from dsa_engine.system.output_files import write_text
from dsa_engine.system.sizes import format_bytes

logger = logging.getLogger(__name__)

_EVERY = 500  # steps from one writing of the loads to the next
TURN_BYTES = 64 << 20  # a rank receives no more in a turn, unless a single expert has more


def count_loads(model: Model, name: str) -> CountRecorder | None:
    """Lets the MoE layers of the model ``name`` and of its MTP modules count their `topk_ids`, if an option needs that;
    returns what writes the loads to a file, if the options ask for one."""
    mesh, layers = model.runtime.mesh, moe_layers(model)
    path = mesh.config.record_expert_loads
    if path is None and mesh.config.rebalance_every is None:
        return None
    if not layers:
        option = "rebalance_every" if path is None else "record_expert_loads"
        raise ValueError(f"{option}: this model has no routed experts; leave it out")
    counter = ExpertCounter(name, [*layers], model.config.n_routed_experts, mesh.ep, mesh.device)
    for number, layer in layers.items():
        layer.router.counts = counter.counts(number)
    model.loads = counter
    return None if path is None else CountRecorder(counter, path if mesh.is_leader else None)


class CountRecorder:
    """Writes all loads since the start each time after ``every`` steps; every rank makes one and calls its methods
    after the same steps. ``path``: of the file; None: another rank writes."""

    def __init__(self, counter: ExpertCounter, path: str | Path | None, every: int = _EVERY):
        self._counter, self._path, self._every = counter, path, every
        self._steps = 0

    def turn(self, _chunks: Sequence[Chunk] = ()) -> None:
        self._steps += 1
        if self._steps % self._every == 0:
            self.write()

    def write(self) -> None:
        """Writes the file, now and when the engine ends; waits for the steps that have been launched."""
        loads = self._counter.total()  # a collective
        if self._path is None:
            return
        try:
            write_text(self._path, loads().text())
        except OSError as error:  # a full disk does not end requests
            logger.warning("record_expert_loads: %s; the file keeps older loads", error)


class Rebalancing:
    """One rank's part; every rank makes one, and calls :meth:`turn` after the same steps.

    Args:
        every: number of steps from one look at the loads to the next.
        loads: returns the loads since its last call, the same on every rank.
        turn_bytes: bytes of experts that a rank receives in a turn; at least one expert.
    """

    def __init__(self, model: Model, every: int, loads: Callable[[], ExpertCounts], turn_bytes: int = TURN_BYTES):
        self._mesh, self._every, self._loads, self._turn_bytes = model.runtime.mesh, every, loads, turn_bytes
        self._ranks, self._groups = self._mesh.ep, model.config.n_group
        self._layers = moe_layers(model)
        self._agree_on_layouts()
        largest = max(self._staged(layer) * expert_bytes(layer.experts.moved) for layer in self._layers.values())
        self.staging = torch.empty(largest, dtype=torch.uint8, device=self._mesh.device)
        # NCCL wants all ranks in the first collective of a group. It allocates its buffers now, before the memory for
        # the caches is counted.
        self._ranks.all_to_all(torch.zeros(self._ranks.size, 1, device=self._mesh.device))
        self.times, self.moved_bytes = 0, 0  # rebalancings, and what has gone from rank to rank, so far
        # By the last loads, the largest load of a rank over the mean, averaged over the layers: as it was, as planned.
        self.before, self.after = 1.0, 1.0
        self._steps, self._received = 0, 0  # steps since the last look at the loads; bytes in this turn
        self._turns: Iterator[None] = iter(())  # what remains of a rebalancing

    @torch.inference_mode()  # as the weights were made
    def turn(self, _chunks: Sequence[Chunk] = ()) -> None:
        """An error in it ends the run."""
        self._steps += 1
        self._received = 0
        for _ in self._turns:
            return
        if self._steps >= self._every:
            self._steps, self._turns = 0, self._rebalanced()
            next(self._turns, None)

    def _rebalanced(self) -> Iterator[None]:
        """A rebalancing of all layers; yields at the end of each turn."""
        loads, sent = self._loads(), self.moved_bytes
        loaded = [(layer, own) for number, layer in self._layers.items() if (own := loads.of_layer(number)) is not None]
        before, after = [], []
        for first in range(0, len(loaded), self._ranks.size):
            some = loaded[first : first + self._ranks.size]
            plans = self._plans(some)
            yield
            for (layer, own), held in zip(some, plans, strict=True):
                before.append(imbalance(own, layer.expert_parallel.placement.held))
                after.append(imbalance(own, held))
                yield from self._moved(layer, held)
        if not loaded:
            return
        self.times += 1
        self.before, self.after = (sum(values) / len(loaded) for values in (before, after))
        if self._mesh.is_leader:
            what = f"experts of {len(loaded)} layers rebalanced in {self._steps + 1} steps"
            message = "%s: the largest load of a rank over the mean %.2f → %.2f; %s moved"
            logger.info(message, what, self.before, self.after, format_bytes(self.moved_bytes - sent))

    def _plans(self, loaded: Sequence[tuple[MoE, Sequence[float]]]) -> list[Held]:
        """Placements of no more layers than there are ranks, by their loads; each rank plans one."""
        layer, loads = loaded[min(self._ranks.index, len(loaded) - 1)]  # with fewer layers some plan the last one again
        held = layer.expert_parallel.placement.held
        planned = self._mesh.experts.placements.better(held, loads, self._groups)
        flat = upload(torch.tensor([[*chain(*planned)]], dtype=torch.int32), self._mesh.device)
        rows = download(self._ranks.all_gather(flat))()
        firsts = [0, *accumulate(map(len, held))]
        return [
            tuple(tuple(row[first:last]) for first, last in zip(firsts, firsts[1:], strict=False))
            for row in rows[: len(loaded)]
        ]

    def _moved(self, layer: MoE, held: Held) -> Iterator[None]:
        """Moves a layer's experts to where ``held`` has them; yields where a turn has moved enough."""
        placement, experts = layer.expert_parallel.placement, layer.experts
        size, staged = expert_bytes(experts.moved), self._staged(layer)
        staging = self.staging[: staged * size].view(staged, size)
        for moves in plan_movement(placement.held, held, staged):
            arriving = size * max(Counter(move.target for move in moves).values())
            if self._received and self._received + arriving > self._turn_bytes:
                yield
            self._received += arriving
            move_round(self._ranks, moves, experts.moved, staging)
            placement.change(after_round(placement.held, moves))
            self.moved_bytes += size * sum(move.source != move.target for move in moves)

    def _staged(self, layer: MoE) -> int:
        """Maximum number of experts that a rank receives in a round."""
        counts = map(len, layer.expert_parallel.placement.held)
        return max(1, min(max(counts), self._turn_bytes // expert_bytes(layer.experts.moved)))

    def _agree_on_layouts(self) -> None:
        """Brings the experts of a layer into a layout that is the same on all ranks."""
        layers = list(self._layers.values())
        own = torch.tensor([[expert_bytes(layer.experts.moved) for layer in layers]], device=self._mesh.device)
        for layer, *sizes in zip(layers, *self._ranks.all_gather(own).tolist(), strict=True):
            if len(set(sizes)) > 1:
                layer.experts.separate()


def moe_layers(model: Model) -> dict[int, MoE]:
    """The MoE layers by their numbers, those of MTP modules after the model's."""
    layers = [*model.layers, *(module.layer for module in model.mtp)]
    return {number: layer.moe for number, layer in enumerate(layers) if layer.moe is not None}
