"""The process mesh: which ranks share a sequence, an expert layer, an output projection.

rank          0 1 2 3 4 5 6 7      world of 8, cp_size 4, tp_size 2
cp            0 0 0 0 1 1 1 1      a sequence is prefilled by the ranks of one context-parallel group
tp            0 0 1 1 2 2 3 3      neighbours (one node) share embedding, o_proj and LM head
ep            0 0 0 0 0 0 0 0      experts are divided over all ranks
world         0 0 0 0 0 0 0 0      all ranks of the mesh, for what concerns every request

A mesh may have only some of the run's ranks; within the mesh they are still numbered from 0.
"""

from __future__ import annotations

import atexit
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from dsa_engine.parallel.agreement import compare
from dsa_engine.parallel.context_parallel import CpLayout
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.experts import MoeDispatch
from dsa_engine.parallel.experts.expert_parallel import ExpertParallel
from dsa_engine.parallel.experts.layer_placements import LayerPlacements
from dsa_engine.parallel.experts.placement import ExpertPlacement, Held
from dsa_engine.parallel.failure.reporter import leave_run, report_failures
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.launch_environment import launched_rank, launched_store, store_address


class MeshOptions(Protocol):
    """The options that a mesh and the model on it read; ``ParallelConfig`` describes them."""

    @property
    def cp_size(self) -> int | None: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def moe_dispatch(self) -> MoeDispatch: ...
    @property
    def decode_dispatch(self) -> MoeDispatch: ...
    @property
    def moe_chunk_size(self) -> int | None: ...
    @property
    def redundant_experts(self) -> int: ...
    @property
    def route_shared_expert(self) -> bool: ...
    @property
    def expert_loads(self) -> str | Path | Sequence[float] | None: ...
    @property
    def cp_layout(self) -> CpLayout: ...
    @property
    def timeout(self) -> float: ...


class Mesh:
    """The groups of this process; made once, from the ``torchrun`` environment, by :meth:`create`.

    Attributes:
        rank, world_size: this process's number in the mesh, and the size of the mesh.
        machines: the number of each rank's machine, counted from 0.
        world: all ranks. ep: the ranks that share the experts. cp: the ranks that prefill a sequence together. tp: the
            neighbours that share embedding, output projection and LM head.
        host: all ranks, for CPU tensors whatever the device; messages use it while other groups run collectives.
        run_ranks: the ranks of the run that serve the same callers: all of this mesh, and of its counterpart if one part
            of the run prefills and another decodes.
        communicates: whether collectives carry bytes between processes; False if the other ranks are emulated.

    Args:
        ranks: the ranks of the run that form the mesh, ascending; default: all.
    """

    communicates = True

    def __init__(
        self,
        config: MeshOptions,
        rank: int,
        world_size: int,
        device: torch.device,
        ranks: Sequence[int] | None = None,
    ):
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
        self._ranks = ranks
        self.run_ranks = self.global_ranks
        self._handles: dict[tuple[int, ...], dist.ProcessGroup] = {}  # groups of the same ranks share one
        self._expert_parallel: dict[tuple[Held, Sequence[float] | None], ExpertParallel] = {}
        self.machines = (0,) * world_size
        self.world = self._group(world_size)
        self.ep = self._group(world_size)
        self.cp = self._group(self.cp_size)
        self.tp = self._group(config.tp_size)
        self.host = self._host_group()

    @classmethod
    def create(
        cls,
        config: MeshOptions,
        device: str = "auto",
        ranks: Sequence[int] | None = None,
        same: Callable[[], Mapping[str, str]] | None = None,
    ) -> Mesh:
        """Joins the world that ``torchrun`` describes in the environment, or makes a mesh of one process.

        A process group that the program has made before is used as it is.

        Args:
            config: how to divide the mesh.
            device: "cpu", "cuda", "cuda:N", or "auto" (CUDA if there is one).
            ranks: the ranks of the run that form this mesh, ascending; default: all. Meshes of different ranks know
                nothing of each other and may run different requests at the same time.
            same: returns texts by name that must be the same on all ranks of the mesh; called only if it has several.

        Raises:
            ValueError: the ranks differ in a text of ``same``, the sizes do not divide the mesh, the device does not
                exist, this process is none of ``ranks``, or the environment names no rank of a run.
            TimeoutError: the process at MASTER_ADDR and MASTER_PORT does not answer as the store of a run.
        """
        report_failures()
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else launched_rank()
        if ranks is not None:
            _check_ranks(ranks, size, rank)
        members = list(range(size)) if ranks is None else list(ranks)
        chosen = choose_device(device)

        def compare_starts() -> None:
            if same is not None and len(members) > 1:
                compare({"the kind of device": chosen.type, **same()}, members, rank, config.timeout)

        joins = size > 1 and not dist.is_initialized()
        if early := joins and launched_store():  # compared before anything that would fail on ranks that differ
            report_failures(connect_s=config.timeout)
            compare_starts()
        if joins:
            if rank > 0 and not early:  # rank 0 is to hold the store itself
                report_failures(connect_s=config.timeout)
            # If a device is bound here, every group is split off the whole run, and all of its ranks must take part.
            _join(chosen, config.timeout, bound=chosen if chosen.type == "cuda" and ranks is None else None)
        if not early:
            compare_starts()
        mesh = cls(config, members.index(rank), len(members), chosen, ranks)
        mesh.set_machines(mesh._exchange_machines())
        return mesh

    @property
    def groups(self) -> tuple[Group, ...]:
        """All but ``host``: world, ep, cp, tp."""
        return self.world, self.ep, self.cp, self.tp

    @property
    def processes(self) -> Group:
        """The ranks that are processes: all ranks, if the mesh communicates."""
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

    def expert_parallel(self, experts: int, layer: int, groups: int = 1, shared: float = 0.0) -> ExpertParallel:
        """The division of a layer's ``experts`` logical experts over the ranks; layers with the same placement and
        loads share one object.

        Args:
            groups: number of groups of consecutive experts in the model's router.
            shared: load of one more expert, over the load of all others together; 0: there is none.

        Raises:
            ValueError: the options do not fit the number of experts, or ``expert_loads`` cannot be read.
        """
        held = self._placements.held(experts, layer, groups, shared)
        loads = self._placements.loads(experts, layer)
        if (held, loads) not in self._expert_parallel:
            made = self._make_expert_parallel(ExpertPlacement(held, self.device), loads)
            self._expert_parallel[held, loads] = made
        return self._expert_parallel[held, loads]

    @cached_property
    def _placements(self) -> LayerPlacements:
        return LayerPlacements.of(self.config, self.machines)

    @contextmanager
    def even_routing(self) -> Iterator[None]:
        """Within the block, choices are spread evenly over the ranks instead of routed, so that the startup can measure
        the memory of a full round."""
        before = [(one, one.even) for one in self._expert_parallel.values()]
        for one, _ in before:
            one.even = True
        try:
            yield
        finally:
            for one, even in before:
                one.even = even

    def _make_expert_parallel(self, placement: ExpertPlacement, loads: Sequence[float] | None) -> ExpertParallel:
        return ExpertParallel(self.ep, placement)

    def set_machines(self, machines: Sequence[int]) -> None:
        """Sets the machine of each rank; warns if the neighbours of a tensor-parallel group are on different ones."""
        self.machines = tuple(machines)
        size = self.config.tp_size
        for first in range(0, self.world_size, size):
            if len(set(self.machines[first : first + size])) > 1 and self.is_leader:
                warnings.warn(
                    f"tp_size {size}: ranks {first} to {first + size - 1} share embedding, output projection and LM "
                    "head, but not a machine, and the links between machines are slow; choose a tp_size that divides "
                    "the ranks of a machine",
                    stacklevel=3,
                )
                break

    def _exchange_machines(self) -> list[int]:
        """Gathers digests of host names; machines are numbered in the order of their first rank."""
        digest = blake2b(socket.gethostname().encode(), digest_size=7).digest()
        names = self.all_gather_int(int.from_bytes(digest, "big"))
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return [numbers[name] for name in names]

    def all_gather_int(self, value: int) -> list[int]:
        """Every rank's ``value`` (below 2⁶³), in order of rank; every rank calls it."""
        return self.world.all_gather(torch.tensor([value], dtype=torch.int64, device=self.device)).tolist()

    def barrier(self, wait_s: float) -> None:
        """Waits until all ranks of the mesh have called this. It uses no collective, as that might time out sooner.

        Raises:
            TimeoutError: a rank has not called it within this many seconds.
        """
        if not self.world.alone:
            compare({}, self.global_ranks, self.global_ranks[self.rank], wait_s)

    def choices(self, top_k: int) -> int:
        """Number of experts of a token: those that its router chooses, and the shared one if that is routed."""
        return top_k + self.config.route_shared_expert

    @property
    def static_decode(self) -> bool:
        """Whether the shapes of a decode step are independent of the routing, so that the host need not wait for it."""
        return self.world_size == 1 or self.config.decode_dispatch == "all_gather"

    def cp_ranks(self, cp_group: int) -> range:
        """The ranks of one context-parallel group."""
        return range(cp_group * self.cp_size, (cp_group + 1) * self.cp_size)

    @property
    def global_ranks(self) -> list[int]:
        """The ranks of the mesh, numbered in the run."""
        return list(range(self.world_size)) if self._ranks is None else list(self._ranks)

    def _host_group(self) -> Group:
        ranks = tuple(range(self.world_size))
        if self.world.alone:
            return Group((self.rank,), 0, None)
        return Group(ranks, self.rank, self._new_group(ranks, "gloo"))

    def _new_group(self, ranks: Sequence[int], backend: str | None = None) -> dist.ProcessGroup:
        return dist.new_group(
            [self.global_ranks[rank] for rank in ranks],
            timeout=timedelta(seconds=self.config.timeout),
            backend=backend,
            use_local_synchronization=self._ranks is not None,  # the run's other ranks make no groups with us
        )

    def _group(self, size: int) -> Group:
        """Neighbouring ranks in groups of ``size``; every rank of the mesh takes part in making every group."""
        mine: Group | None = None
        for first in range(0, self.world_size, size):
            ranks = tuple(range(first, first + size))
            if size > 1 and ranks not in self._handles:
                self._handles[ranks] = self._new_group(ranks)
            if self.rank in ranks:
                mine = Group(ranks, self.rank - first, self._handles.get(ranks))
        assert mine is not None
        return mine


def _check_ranks(ranks: Sequence[int], global_size: int, global_rank: int) -> None:
    if list(ranks) != sorted(set(ranks)) or not set(ranks) <= set(range(global_size)):
        raise ValueError(f"ranks must be different ones of 0 … {global_size - 1}, ascending, not {list(ranks)!r}")
    if global_rank not in ranks:
        raise ValueError(f"this process is rank {global_rank} of the run, which is none of {list(ranks)!r}")


def _join(device: torch.device, timeout_s: float, bound: torch.device | None) -> None:
    """Makes the process group of the whole run."""
    backend, (host, port) = "nccl" if device.type == "cuda" else "gloo", store_address()
    try:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), device_id=bound)
    except dist.DistStoreError as error:
        raise TimeoutError(
            f"the other ranks have not all come to {host}:{port} (MASTER_ADDR, MASTER_PORT) within {timeout_s:g} "
            f"seconds: {error} Start all {launched_rank()[1]} of WORLD_SIZE, with the same address"
        ) from error
    report_failures(connect_s=timeout_s)
    atexit.register(_leave)  # runs while failures are still watched for, as it may wait for a peer


def _leave() -> None:
    leave_run()
    if dist.is_initialized():
        dist.destroy_process_group()
