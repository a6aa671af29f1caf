"""Counts the loads of experts, and writes them to a file while requests run (``record_expert_loads``)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from dsa_engine.engine.rebalancing import moe_layers
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.model.model import Model
from dsa_engine.parallel.experts.load_counter import LoadCounter
from dsa_engine.system.output_files import write_text

logger = logging.getLogger(__name__)

_EVERY = 500  # steps from one writing to the next


def count_loads(model: Model, name: str) -> LoadRecorder | None:
    """Lets the MoE layers of a model and of its MTP modules count their `topk_ids`, if an option needs that.

    Args:
        name: the model's.

    Returns:
        what writes the loads to a file, if the options ask for one.

    Raises:
        ValueError: loads are to be recorded, but the model has no routed experts.
    """
    mesh, layers = model.runtime.mesh, moe_layers(model)
    path = mesh.config.record_expert_loads
    if path is None and mesh.config.rebalance_every is None:
        return None
    if not layers:
        option = "rebalance_every" if path is None else "record_expert_loads"
        raise ValueError(f"{option}: this model has no routed experts; leave it out")
    counter = LoadCounter(name, [*layers], model.config.n_routed_experts, mesh.ep, mesh.device)
    for number, layer in layers.items():
        layer.counts = counter.counts(number)
    model.loads = counter
    return None if path is None else LoadRecorder(counter, path if mesh.is_leader else None)


class LoadRecorder:
    """Writes all loads since the start; every rank makes one and calls its methods after the same steps.

    Args:
        path: of the file; None: another rank writes.
        every: number of steps from one writing to the next.
    """

    def __init__(self, counter: LoadCounter, path: str | Path | None, every: int = _EVERY):
        self._counter, self._path, self._every = counter, path, every
        self._steps = 0

    def turn(self, _chunks: Sequence[Chunk] = ()) -> None:
        """Called after every step that has been launched."""
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
