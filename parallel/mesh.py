"""The process mesh: which ranks share a sequence, an expert layer, an output projection.

rank          0 1 2 3 4 5 6 7      world of 8, cp_size 4, tp_size 2
cp            0 0 0 0 1 1 1 1      a sequence is prefilled by the ranks of one context-parallel group
tp            0 0 1 1 2 2 3 3      neighbours (one node) share embedding, o_proj and LM head
ep            0 0 0 0 0 0 0 0      experts are divided over the world
"""

from __future__ import annotations

import atexit
import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, get_args

import torch
import torch.distributed as dist

from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.routing import Routing
from dsa_engine.parallel.failure import report_failures
from dsa_engine.parallel.group import Group

CpLayout = Literal["head_tail", "contiguous"]
MoeDispatch = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True)
class ParallelConfig:
    """How to use the processes of a ``torchrun`` world; the defaults fit any world.

    Attributes:
        cp_size: ranks that prefill a sequence together; default: the whole world. It must divide the world size; with
            less than the world, several groups prefill different sequences.
        tp_size: neighbouring ranks that share embedding, output projection and LM head.
        moe_dispatch: "all_to_all" sends tokens to the ranks that hold their experts; "all_gather" gives every rank all
            tokens and sums the results (static shapes). Of prefill steps.
        decode_dispatch: the same, of decode steps. CUDA graphs need the static shapes of "all_gather".
        cp_layout: "head_tail" balances causal work; "contiguous" is there to show what that is worth.
        timeout: seconds after which a collective that does not complete ends the run.
        emulate_world: runs, in one process, the work of one rank of a world of this size, to be measured: the other
            ranks are made up, experts are chosen evenly, and the tokens that come out mean nothing.
        emulate_rank: which rank that is.
        expert_loads: with ``emulate_world``: the relative load of every routed expert; default: all alike.
    """

    cp_size: int | None = None
    tp_size: int = 1
    moe_dispatch: MoeDispatch = "all_to_all"
    decode_dispatch: MoeDispatch = "all_gather"
    cp_layout: CpLayout = "head_tail"
    timeout: float = 600.0
    emulate_world: int | None = None
    emulate_rank: int = 0
    expert_loads: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        sizes = (("cp_size", self.cp_size), ("tp_size", self.tp_size), ("emulate_world", self.emulate_world))
        for name, value in sizes:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name, chosen, allowed in (
            ("moe_dispatch", self.moe_dispatch, get_args(MoeDispatch)),
            ("decode_dispatch", self.decode_dispatch, get_args(MoeDispatch)),
            ("cp_layout", self.cp_layout, get_args(CpLayout)),
        ):
            if chosen not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {chosen!r}")
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")
        self._check_emulation()

    def _check_emulation(self) -> None:
        rank, world = self.emulate_rank, self.emulate_world or 1
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world:
            raise ValueError(
                f"emulate_rank must be one of the ranks 0 … {world - 1} of emulate_world {self.emulate_world}, "
                f"not {rank!r}"
            )
        if self.expert_loads is None:
            return
        if world < 2:
            raise ValueError("expert_loads need an emulate_world of at least 2; elsewhere the router chooses")
        loads = self.expert_loads
        numbers = isinstance(loads, (tuple, list)) and all(
            isinstance(x, (int, float)) and not isinstance(x, bool) and 0 <= x < math.inf for x in loads
        )
        if not numbers or not any(loads):
            raise ValueError(f"expert_loads must be numbers of at least 0, and one above it, not {loads!r:.80}")
        object.__setattr__(self, "expert_loads", tuple(loads))


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
