"""One rank of many in one process: its options, its experts, which tokens of all ranks choose evenly, and its mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from dsa_engine.config.checks import PositiveInt, check, is_integer
from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, RecvPlan
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.mesh import Mesh


@dataclass(frozen=True)
class EmulatedConfig(ParallelConfig):
    """Runs the work of one rank of a world in one process, to measure it. Give it to :class:`dsa_engine.LLM` as
    ``parallel``. The other ranks are made up, tokens choose experts evenly, and the resulting tokens mean nothing.
    """

    emulate_world: int = 1  # number of ranks
    emulate_rank: int = 0  # the rank of this process
    node_size: int = 8  # number of consecutive ranks on a node

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
            if not KINDS[method := getattr(self, name)].emulated:
                others = " or ".join(one for one, kind in KINDS.items() if kind.emulated)
                raise ValueError(f"{name} {method!r} is not emulated: give {others}")

    def node_ranks(self) -> int:
        return min(self.node_size, self.emulate_world)

    def run_position(self) -> tuple[int, int]:
        return self.emulate_rank, self.emulate_world


class EmulatedExpertParallel(ExpertParallel):
    """This rank's pairs are spread over all ranks, and those that come to it over its experts. Every rank has as many
    tokens as this one, and sends it as many as it gets from it."""

    def __init__(self, group: Group, placement: ExpertPlacement):
        super().__init__(group, placement)
        self.even, self._dealt = True, 0

    def received(self, topk_ids: torch.Tensor, local_pairs: int | None = None) -> tuple[torch.Tensor, int | None]:
        """Pairs that choose this rank's experts one after the other, if their number is known."""
        if local_pairs is None:
            return self.placement.spread(topk_ids), self.placement.first[self.group.index]
        dealt = torch.full_like(topk_ids, -1)
        rows, pairs = max(1, len(dealt)), torch.arange(local_pairs, device=dealt.device)
        column = pairs // rows
        dealt[pairs % rows, column] = ((self._dealt + pairs + column) % len(self.held)).to(dealt.dtype)
        self._dealt = (self._dealt + local_pairs) % len(self.held)
        return dealt, None

    def counts(self, sent: torch.Tensor) -> Callable[[], tuple[RecvPlan, int]]:
        self.group.all_gather(sent)
        wait: Callable[[], tuple[RecvPlan, int]] = this_thread.as_one(
            partial, EmulatedExpertParallel._as_sent, self, download(sent)
        )
        return wait

    def _as_sent(self, read: Callable[[], list[list[int]]]) -> tuple[RecvPlan, int]:
        rows, self._dealt = read(), 0
        plan = RecvPlan.of(rows, rows)
        return plan, plan.local_pairs


class EmulatedDivision(ExpertDivision):
    """Experts that tokens choose evenly."""

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        return EmulatedExpertParallel(self._mesh.ep, placement)


class EmulatedMesh(Mesh):
    """Groups of the right sizes, of which only this rank exists."""

    config: EmulatedConfig

    def __init__(self, config: EmulatedConfig, device: torch.device):
        super().__init__(config, config.emulate_rank, config.emulate_world, device)
        self.set_nodes([rank // config.node_size for rank in range(self.world_size)])

    @property
    def processes(self) -> Group:
        return self.host

    def _host_group(self) -> Group:
        return Group((self.rank,), 0, None)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> EmulatedGroup:
        (mine,) = [tuple(part) for part in parts if self.rank in part]
        return EmulatedGroup(mine, mine.index(self.rank), None)

    def _make_node_groups(self) -> None:
        """Tokens do not travel by node."""

    def _divide_experts(self) -> ExpertDivision:
        return EmulatedDivision(self) if self.world_size > 1 else super()._divide_experts()


@create_mesh.register(EmulatedConfig)
def _emulated(
    config: EmulatedConfig, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None
) -> EmulatedMesh:
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"emulate_world {config.emulate_world} runs one rank in one process; start it without torchrun"
        )
    return EmulatedMesh(config, choose_device(device))
