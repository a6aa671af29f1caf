"""One rank of many in one process: its options, its experts, which tokens of all ranks choose evenly, and its mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dsa_engine.config.checks import PositiveInt, check, is_integer
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts.all_to_all import RecvPlan
from dsa_engine.parallel.experts.dispatch import Dispatch, Received
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.traffic import DispatchChoice
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.mesh import Mesh


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
            if (method := getattr(self, name)) in ("by_node", "deep_ep"):
                raise ValueError(f"{name} {method!r} is not emulated: give all_to_all or all_gather")

    def node_ranks(self) -> int:
        return min(self.node_size, self.emulate_world)

    def run_position(self) -> tuple[int, int]:
        return self.emulate_rank, self.emulate_world


class EmulatedExpertParallel(ExpertParallel):
    """This rank's pairs are spread over all ranks, and those that come to it over its experts. Every rank has as many
    tokens as this one, and sends it as many as it gets from it."""

    def __init__(self, group: Group, placement: ExpertPlacement, choice: DispatchChoice | None = None):
        super().__init__(group, placement, choice=choice)
        self.even = True

    def _gather(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens: int
    ) -> Callable[[], Received]:
        wait = super()._gather(tokens, topk_ids, topk_weights, max_tokens)

        def received() -> Received:
            copies = wait()
            return copies._replace(topk_ids=self.placement.spread(copies.topk_ids))

        return received

    def _counts(self, sent: torch.Tensor) -> Generator[None, None, tuple[RecvPlan, int]]:
        self.group.all_gather(sent)
        read = download(sent)
        yield
        rows = read()
        plan = RecvPlan.of(rows, rows)
        return plan, plan.local_pairs

    def _all_to_all(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_pairs: int
    ) -> Iterator[Dispatch | None]:
        for one in super()._all_to_all(tokens, topk_ids, topk_weights, max_pairs):
            yield None if one is None else _Dealt(one, len(self.held))


class _Dealt(Dispatch):
    """A dispatch whose received tokens choose this rank's ``held`` experts one after the other."""

    def __init__(self, dispatch: Dispatch, held: int):
        self._dispatch, self._held, self._pairs = dispatch, held, 0

    @property
    def rounds(self) -> int:
        return self._dispatch.rounds

    def receive(self, number: int) -> Received:
        received = self._dispatch.receive(number)
        topk_ids = torch.full_like(received.topk_ids, -1)
        rows, pairs = max(1, len(topk_ids)), torch.arange(received.local_pairs or 0, device=topk_ids.device)
        column = pairs // rows
        topk_ids[pairs % rows, column] = ((self._pairs + pairs + column) % self._held).to(topk_ids.dtype)
        self._pairs += len(pairs)
        return received._replace(topk_ids=topk_ids, first=None)

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        self._dispatch.send_back(number, sums)

    def combine(self) -> torch.Tensor:
        return self._dispatch.combine()


class EmulatedDivision(ExpertDivision):
    """Experts that tokens choose evenly."""

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        return EmulatedExpertParallel(self._mesh.ep, placement, choice=self._choice)


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

    def _divide_experts(self) -> ExpertDivision:
        return EmulatedDivision(self) if self.world_size > 1 else super()._divide_experts()


@create_mesh.register(EmulatedConfig)
def _emulated(
    config: EmulatedConfig, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None
) -> EmulatedMesh:
    """The mesh of the emulated rank.

    Raises:
        ValueError: the process is one of several, or see :meth:`Mesh.create`.
    """
    if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(
            f"emulate_world {config.emulate_world} runs one rank in one process; start it without torchrun"
        )
    return EmulatedMesh(config, choose_device(device))
