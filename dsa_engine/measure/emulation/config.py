"""The options of an emulated rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from dsa_engine.config.checks import PositiveInt, check, is_integer
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.device import choose_device


@dataclass(frozen=True)
class EmulatedConfig(ParallelConfig):
    """Runs the work of one rank of a world in one process, to measure it. Give it to :class:`dsa_engine.LLM` as
    ``parallel``. The other ranks are made up, tokens choose experts evenly, and the resulting tokens mean nothing.

    Attributes:
        emulate_world: number of ranks.
        emulate_rank: the rank of this process.
        node_size: number of consecutive ranks on a node.
    """

    emulate_world: int = 1
    emulate_rank: int = 0
    node_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("emulate_world", "node_size"):
            check(name, getattr(self, name), PositiveInt)
        rank, world = self.emulate_rank, self.emulate_world
        if not is_integer(rank) or not 0 <= rank < world:
            raise ValueError(
                f"emulate_rank must be one of the ranks 0 … {world - 1} of emulate_world {world}, not {rank!r}"
            )
        for name in ("prefill_ranks", "rebalance_every", "record_expert_loads"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"{name} needs other ranks, and those of emulate_world {world} are made up; leave it out"
                )
        for name in ("moe_dispatch", "decode_dispatch"):
            if getattr(self, name) == "by_node":
                raise ValueError(f"{name} 'by_node' is not emulated: give all_to_all or all_gather")

    def create_mesh(self, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None) -> EmulatedMesh:
        """The mesh of the emulated rank.

        Raises:
            ValueError: the process is one of several, or see :meth:`Mesh.create`.
        """
        if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"emulate_world {self.emulate_world} runs one rank in one process; start it without torchrun"
            )
        return EmulatedMesh(self, choose_device(device))

    def run_position(self) -> tuple[int, int]:
        return self.emulate_rank, self.emulate_world
