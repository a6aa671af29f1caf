"""The options of an emulated rank."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dsa_engine.config.checks import integer, is_integer
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.apart import position
from dsa_engine.parallel.device import choose_device


@dataclass(frozen=True)
class EmulatedConfig(ParallelConfig):
    """Runs the work of one rank of a world in one process, to measure it. Give it to :class:`dsa_engine.LLM` as
    ``parallel``. The other ranks are made up, experts are assigned, and the resulting tokens mean nothing.

    Attributes:
        emulate_world: number of ranks; with ``prefill_ranks`` those of both parts of the run.
        emulate_rank: the rank of this process, which prefills if it is one of the first ``prefill_ranks``.
        expert_loads: experts are also assigned with these loads. Numbers do not change the placement without
            ``redundant_experts``.
        machine_size: number of consecutive ranks on a machine.
    """

    emulate_world: int = 1
    emulate_rank: int = 0
    machine_size: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("emulate_world", "machine_size"):
            integer(minimum=1)(name, getattr(self, name))
        rank, world, loads = self.emulate_rank, self.emulate_world, self.expert_loads
        if not is_integer(rank) or not 0 <= rank < world:
            raise ValueError(
                f"emulate_rank must be one of the ranks 0 … {world - 1} of emulate_world {world}, not {rank!r}"
            )
        if loads is not None and world < 2:
            raise ValueError("expert_loads need an emulate_world of at least 2; elsewhere the router chooses")

    def create_mesh(self, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None) -> EmulatedMesh:
        """The mesh of the emulated rank.

        Raises:
            ValueError: the process is one of several, or see :meth:`Mesh.create`.
        """
        if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
            raise ValueError(
                f"emulate_world {self.emulate_world} runs one rank in one process; start it without torchrun"
            )
        if self.prefill_ranks is None:
            return EmulatedMesh(self, choose_device(device))
        return self._mesh_of_part(choose_device(device))

    def run_position(self) -> tuple[int, int]:
        return self.emulate_rank, self.emulate_world

    def _mesh_of_part(self, device: torch.device) -> EmulatedMesh:
        """That of the same rank in its part of the run alone. Each part begins on a machine that it does not share."""
        rank, prefill, size = position(self)
        if rank < prefill:
            return EmulatedMesh(replace(self, prefill_ranks=None, emulate_world=prefill), device, "prefill")
        own, ranks = rank - prefill, size - prefill
        decode = replace(self, prefill_ranks=None, emulate_world=ranks, emulate_rank=own, cp_size=1)
        return EmulatedMesh(decode, device, "decode")
