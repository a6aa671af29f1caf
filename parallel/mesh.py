"""The process mesh: which ranks share a sequence, an expert layer, an output projection.

rank          0 1 2 3 4 5 6 7      world of 8, cp_size 4, tp_size 2
cp            0 0 0 0 1 1 1 1      a sequence is prefilled by the ranks of one context-parallel group
tp            0 0 1 1 2 2 3 3      neighbours (one node) share embedding, o_proj and LM head
ep            0 0 0 0 0 0 0 0      experts are divided over the world
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta

import torch
import torch.distributed as dist

from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.routing import Routing
from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.failure import report_failures
from dsa_engine.parallel.group import Group


class Mesh:
    """The groups of this process; made once, from the ``torchrun`` environment, by :meth:`create`."""

    def __init__(self, config: ParallelConfig, rank: int, world_size: int, device: torch.device):
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.cp_size = config.cp_size or world_size
        for name, size in (("cp_size", self.cp_size), ("tp_size", config.tp_size)):
            if world_size % size:
                raise ValueError(
                    f"{name} {size} does not divide the world size {world_size}; start a multiple of {size}"
                )
        self.emulated = config.emulate_world is not None
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}  # groups of the same ranks share one
        self.ep = self._group(world_size)
        self.cp = self._group(self.cp_size)
        self.tp = self._group(config.tp_size)
        if self.emulated:
            self.ep.routing = Routing(world_size, rank, config.expert_loads)

    @classmethod
    def create(cls, config: ParallelConfig, device: str = "auto") -> Mesh:
        """Joins the world that ``torchrun`` describes in the environment, or makes a mesh of one process.

        A process group that the program has made before is used as it is.

        Args:
            config: how to divide the world.
            device: "cpu", "cuda", "cuda:N", or "auto" (CUDA where there is one).

        Raises:
            ValueError: the sizes do not divide the world, the device does not exist, or a rank is to be emulated in a
                world that is there.
        """
        report_failures()
        if config.emulate_world is not None:
            if dist.is_initialized() or "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
                raise ValueError(
                    f"emulate_world {config.emulate_world} runs one rank in one process; start it without torchrun"
                )
            return cls(config, config.emulate_rank, config.emulate_world, _device(device))
        if dist.is_initialized():
            world_size, rank = dist.get_world_size(), dist.get_rank()
        else:
            world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        chosen = _device(device)
        if world_size > 1 and not dist.is_initialized():
            cuda = chosen.type == "cuda"
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                timeout=timedelta(seconds=config.timeout),
                device_id=chosen if cuda else None,
            )
            atexit.register(_leave)
            report_failures(connect=True)
        return cls(config, rank, world_size, chosen)

    @property
    def groups(self) -> tuple[Group, Group, Group]:
        """All of them: ep, cp, tp."""
        return self.ep, self.cp, self.tp

    @property
    def reports(self) -> bool:
        """Whether this process speaks for the run: rank 0 does, and an emulated rank is alone."""
        return self.emulated or self.rank == 0

    @property
    def static_decode(self) -> bool:
        """Whether no shape in a decode step depends on the routing: the host need not ask the device for it."""
        return self.world_size == 1 or self.config.decode_dispatch == "all_gather"

    def begin_step(self, rows: list[int]) -> None:
        """Tells how many tokens each rank of the world computes in the step; only planned routing wants to know."""
        if self.ep.routing is not None:
            self.ep.routing.rows = rows

    def limit_routing(self, groups: int, top_groups: int) -> None:
        """Tells planned routing that a token's experts come from ``top_groups`` of ``groups`` consecutive groups."""
        if self.ep.routing is not None:
            self.ep.routing.groups, self.ep.routing.top_groups = groups, top_groups

    def cp_ranks(self, cp_group: int) -> range:
        """The ranks of one context-parallel group."""
        return range(cp_group * self.cp_size, (cp_group + 1) * self.cp_size)

    def _group(self, size: int) -> Group:
        """Neighbouring ranks in groups of ``size``; every rank takes part in making every group."""
        if self.emulated:
            first = self.rank - self.rank % size
            return EmulatedGroup(tuple(range(first, first + size)), self.rank - first, None)
        mine: Group | None = None
        for first in range(0, self.world_size, size):
            ranks = tuple(range(first, first + size))
            if size > 1 and ranks not in self._handles:
                timeout = timedelta(seconds=self.config.timeout)
                self._handles[ranks] = dist.new_group(list(ranks), timeout=timeout)
            if self.rank in ranks:
                mine = Group(ranks, self.rank - first, self._handles.get(ranks))
        assert mine is not None
        return mine


def _device(device: str) -> torch.device:
    """The device of this process, made the current one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    known = "give 'auto', 'cpu', 'cuda' or 'cuda:N'"
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device {device!r} is not known; {known}") from error
    if chosen.type == "cpu":
        return chosen
    if chosen.type != "cuda":
        raise ValueError(f"device {device!r} is not supported; {known}")
    if not torch.cuda.is_available():
        raise ValueError(f"device {device!r} was asked for, but PyTorch sees no CUDA device; give 'cpu' or 'auto'")
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if chosen.index is not None and neighbours > 1:
        raise ValueError(f"device {device!r} is one device, for {neighbours} ranks on this machine; give 'cuda'")
    index = int(os.environ.get("LOCAL_RANK", "0")) if chosen.index is None else chosen.index
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"device cuda:{index} was asked for, but there are {torch.cuda.device_count()} CUDA devices; "
            "start as many ranks on a machine as it has devices, or give 'cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
