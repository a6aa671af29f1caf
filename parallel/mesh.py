"""The process mesh: which ranks share a sequence, an expert layer, an output projection.

rank          0 1 2 3 4 5 6 7      world of 8, cp_size 4, tp_size 2
cp            0 0 0 0 1 1 1 1      a sequence is prefilled by the ranks of one context-parallel group
tp            0 0 1 1 2 2 3 3      neighbours (one node) share embedding, o_proj and LM head
ep            0 0 0 0 0 0 0 0      experts are divided over all ranks
world         0 0 0 0 0 0 0 0      all ranks of the mesh, for what concerns every request

A mesh may have only some of the run's ranks; within the mesh they are still numbered from 0.

Groups of the same ranks share a communicator, which carries one collective after another. Tokens on their way to
experts have their own: with micro-batches they travel beside the collectives of attention.
"""

from __future__ import annotations

import atexit
import socket
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from hashlib import blake2b
from typing import TypeVar

import torch
import torch.distributed as dist

from dsa_engine.kernels.runtime.transfer import SideStream
from dsa_engine.parallel.agreement import Meeting, compare
from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.device import choose_device, warn_of_old_driver
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.experts.placement import NodeGroups, has_two_levels, rails_of
from dsa_engine.parallel.failure import report_failures
from dsa_engine.parallel.group import Group, agree_on_names, new_group
from dsa_engine.parallel.launch_environment import launched_rank, launched_store

T = TypeVar("T")

EXPERTS = 1  # number of the communicators that carry tokens to experts and back; 0: all others


class Mesh:
    """The groups of this process; made once, from the ``torchrun`` environment, by :meth:`create`.

    Attributes:
        rank, world_size: this process's number in the mesh, and the size of the mesh.
        nodes: the number of each rank's node, counted from 0.
        node_groups: the groups of dispatches by node; None: no option wants them, or nodes have one level.
        experts: the experts of each rank.
        world: all ranks. ep: the ranks that share the experts. cp: the ranks that prefill a sequence together. dcp:
            those of them that hold its pages together. tp: the neighbours that share embedding, output projection and
            LM head.
        host: all ranks, for CPU tensors whatever the device; messages use it while other groups run collectives.
        run_ranks: the ranks of the run that serve the same callers: all of this mesh, and of its counterpart if one
            part of the run prefills and another decodes.

    Args:
        ranks: the ranks of the run that form the mesh, ascending; default: all.
    """

    def __init__(
        self,
        config: ParallelConfig,
        rank: int,
        world_size: int,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ):
        self.config, self.rank, self.world_size, self.device = config, rank, world_size, device
        self.cp_size = config.cp_size or world_size
        for name, size in (("cp_size", self.cp_size), ("tp_size", config.tp_size)):
            if world_size % size:
                raise ValueError(
                    f"{name} {size} does not divide the world size {world_size}; start a multiple of {size}"
                )
        if self.cp_size % config.dcp_size:
            raise ValueError(
                f"dcp_size {config.dcp_size} does not divide cp_size {self.cp_size}: the ranks that hold a request's "
                "pages are among those that prefill it; take a divisor"
            )
        if config.rebalance_every is not None and world_size == 1:
            raise ValueError(
                f"rebalance_every {config.rebalance_every}: experts move between ranks, and there is only one; start "
                "several, or leave it out"
            )
        self._ranks = ranks
        self.run_ranks = self.global_ranks
        self._handles: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}  # by ranks and communicator
        self.nodes = (0,) * world_size
        self.node_groups: NodeGroups | None = None
        self.experts = self._divide_experts()
        self.world = self._group(world_size)
        self.ep = self._group(world_size, EXPERTS)
        self.cp = self._group(self.cp_size)
        self.dcp = self._group(config.dcp_size)
        self.tp = self._group(config.tp_size)
        self.host = self._host_group()

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        device: str = "auto",
        ranks: Sequence[int] | None = None,
        same: Callable[[], Mapping[str, str]] | None = None,
        run_ranks: Sequence[int] | None = None,
    ) -> Mesh:
        """Joins the world that ``torchrun`` describes in the environment, or makes a mesh of one process.

        A process group that the program has made before is used as it is.

        Args:
            device: "cpu", "cuda", "cuda:N", or "auto" (CUDA if there is one).
            ranks: the ranks of the run that form this mesh, ascending; default: all. Meshes of different ranks know
                nothing of each other and may run different requests at the same time.
            same: returns texts by name that must be the same on all of ``run_ranks``; called only if they are several.
            run_ranks: those of this mesh and of its counterpart, which are made together; default: ``ranks``.

        Raises:
            ValueError: the ranks differ in a text of ``same``, or an option or the environment is not possible.
            TimeoutError: no store of a run answers at MASTER_ADDR and MASTER_PORT.
        """
        report_failures()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else launched_rank()
        if ranks is not None:
            _check_ranks(ranks, size, rank)
        members = list(range(size)) if ranks is None else list(ranks)
        run = members if run_ranks is None else list(run_ranks)
        chosen = choose_device(device, one_part=len(run) == len(members))
        if size > 1 and not dist.is_initialized():
            if rank > 0 or launched_store():  # else rank 0 is to hold the store itself
                report_failures(connect_s=config.timeout)
            dist.init_process_group(
                "nccl" if chosen.type == "cuda" else "gloo",
                timeout=timedelta(seconds=config.timeout),
                # If a device is bound here, every group is split off the whole run, and all ranks must take part.
                device_id=chosen if chosen.type == "cuda" and ranks is None else None,
            )
            report_failures(connect_s=config.timeout)
            atexit.register(_leave)  # runs while failures are still watched for, as it may wait for a peer
        if same is not None and len(run) > 1:
            compare({"the kind of device": chosen.type, **same()}, run, rank, config.timeout)
        if ranks is not None:
            agree_on_names(members, rank, config.timeout)
        make = partial(cls, config, members.index(rank), len(members), chosen, ranks)
        mesh = Meeting(run, rank).all_succeed(make, config.timeout) if len(run) > 1 else make()
        mesh.run_ranks = run
        mesh.set_nodes(mesh._exchange_nodes())
        if chosen.type == "cuda" and len(set(mesh.nodes)) > 1 and mesh.is_leader:
            warn_of_old_driver()
        return mesh

    @property
    def groups(self) -> tuple[Group, ...]:
        """All but ``host``: world, ep, cp, tp, dcp if ranks hold contexts together, and those inside and between
        nodes."""
        by_node = (self.node_groups.node, self.node_groups.rail) if self.node_groups else ()
        together = () if self.dcp.size == 1 else (self.dcp,)
        return self.world, self.ep, self.cp, self.tp, *together, *by_node

    @property
    def processes(self) -> Group:
        """The ranks that are processes: all ranks, unless the others are emulated."""
        return self.world

    @property
    def run_rank(self) -> int:
        """This process's number in the run."""
        return self.global_ranks[self.rank]

    @property
    def is_front(self) -> bool:
        """Whether callers call here if they call on one rank only."""
        return self.run_rank == self.run_ranks[0]

    @property
    def has_counterpart(self) -> bool:
        """Whether this mesh is the part of a run that prefills, or that decodes."""
        return len(self.run_ranks) > self.world_size

    @property
    def is_leader(self) -> bool:
        """Whether this process reports for the mesh."""
        return self.processes.index == 0

    def set_nodes(self, nodes: Sequence[int]) -> None:
        """Sets the node of each rank; warns if the neighbours of a tensor-parallel group are on different ones.
        Every rank of the mesh calls it, before any layer is made."""
        self.nodes = tuple(nodes)
        size = self.config.tp_size
        for first in range(0, self.world_size, size):
            if len(set(self.nodes[first : first + size])) > 1 and self.is_leader:
                warnings.warn(
                    f"tp_size {size}: ranks {first} to {first + size - 1} share embedding, output projection and LM "
                    "head, but not a node, and the links between nodes are slow; choose a tp_size that divides "
                    "the ranks of a node",
                    stacklevel=3,
                )
                break
        wanted = any(KINDS[name].node_groups for name in (self.config.moe_dispatch, self.config.decode_dispatch))
        if has_two_levels(self.nodes) and wanted:
            self.node_groups = self._make_node_groups()

    def _make_node_groups(self) -> NodeGroups | None:
        numbers = range(1 + max(self.nodes))
        inside = [[rank for rank, node in enumerate(self.nodes) if node == number] for number in numbers]
        node, rail = self._part(inside, EXPERTS), self._part(rails_of(self.nodes), EXPERTS)
        return NodeGroups(node, rail, self.nodes, *(SideStream(self.device, priority=-1) for _ in range(2)))

    def _exchange_nodes(self) -> list[int]:
        """Gathers digests of host names; nodes are numbered in the order of their first rank."""
        digest = blake2b(socket.gethostname().encode(), digest_size=7).digest()
        names = self.all_gather_int(int.from_bytes(digest, "big"))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return [numbers[name] for name in names]

    def all_gather_int(self, value: int) -> list[int]:
        """Every rank's ``value`` (below 2⁶³), in order of rank; every rank calls it."""
        return self.world.all_gather(torch.tensor([value], dtype=torch.int64, device=self.device)).tolist()

    def together(self, work: Callable[[], T], wait_s: float) -> T:
        """See :meth:`.Meeting.all_succeed`, over ``run_ranks``; it uses no collective, which might time out sooner."""
        alone = self.host.alone and not self.has_counterpart
        return (
            work() if alone else Meeting(self.run_ranks, self.run_rank).all_succeed(work, wait_s, self.config.timeout)
        )

    @property
    def static_decode(self) -> bool:
        """Whether the shapes of a decode step are independent of the routing, so that the host need not wait for it."""
        return self.experts.dispatchers[True].static_shapes

    def cp_ranks(self, cp_group: int) -> range:
        """The ranks of one context-parallel group."""
        return range(cp_group * self.cp_size, (cp_group + 1) * self.cp_size)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the mesh, numbered in the run."""
        return list(range(self.world_size)) if self._ranks is None else list(self._ranks)

    def _divide_experts(self) -> ExpertDivision:
        return ExpertDivision(self)

    def _host_group(self) -> Group:
        ranks = tuple(range(self.world_size))
        if self.world.alone:
            return Group((self.rank,), 0, None)
        return Group(ranks, self.rank, self._new_group(ranks, "gloo"))

    def _new_group(self, ranks: Sequence[int], backend: str | None = None, communicator: int = 0) -> dist.ProcessGroup:
        own, options = [self.global_ranks[rank] for rank in ranks], None
        if communicator == EXPERTS and dist.is_initialized() and dist.get_backend() == "nccl":
            # Beside one half's experts the other half's tokens travel: when a program ends, theirs come next.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        return new_group(own, self.config.timeout, backend, options, alone=self._ranks is not None)

    def _group(self, size: int, communicator: int = 0) -> Group:
        """Neighbouring ranks in groups of ``size``; every rank of the mesh takes part in making every group."""
        return self._part([range(first, first + size) for first in range(0, self.world_size, size)], communicator)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> Group:
        """This rank's group, if all ranks are divided like this; every rank of the mesh calls it."""
        mine: Group | None = None
        for part in parts:
            ranks = tuple(part)
            key = ranks, communicator
            if len(ranks) > 1 and key not in self._handles:
                self._handles[key] = self._new_group(ranks, communicator=communicator)
            if self.rank in ranks:
                mine = Group(ranks, ranks.index(self.rank), self._handles.get(key))
        assert mine is not None
        return mine


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_ranks(ranks: Sequence[int], global_size: int, global_rank: int) -> None:
    if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(global_size)):
        raise ValueError(f"ranks must be different ones of 0 … {global_size - 1}, ascending, not {list(ranks)!r}")
    if global_rank not in ranks:
        raise ValueError(f"this process is rank {global_rank} of the run, which is none of {list(ranks)!r}")
