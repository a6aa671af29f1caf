"""The other ranks of a fake device's world: collectives that allocate their results and move nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from dsa_engine.kernels.runtime.kernel import this_thread
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.experts.placement import (
    ExpertParallel,
    ExpertPlacement,
    NodeGroups,
    RecvPlan,
    Way,
)
from dsa_engine.parallel.group import Group
from fake_cuda.device import FakeDevice
from fake_cuda.events import Launch

# Assumed: memory that a library allocates for the links of a collective at its first run.
LINK_BYTES = 256 << 20


@dataclass(frozen=True)
class FakeConfig(ParallelConfig):
    """One rank of a world on a :class:`~.device.FakeDevice`.

    Attributes:
        device: the device of this rank.
        world: number of ranks.
        skew: tokens that reach this rank's experts in a prefill, over those of a balanced routing.
        node_size: number of consecutive ranks on a node; None: all.
    """

    device: FakeDevice | None = None
    world: int = 1
    skew: float = 1.0
    node_size: int | None = None

    def node_ranks(self) -> int:
        return self.node_size or self.world

    def run_position(self) -> tuple[int, int]:
        return 0, self.world


class FakeMesh(Mesh):
    """A mesh of which only rank 0 exists."""

    config: FakeConfig

    def all_gather_int(self, value: int) -> list[int]:
        return [value] * self.world_size

    def _host_group(self) -> Group:
        return Group((0,), 0, None)

    def _part(self, parts: Sequence[Sequence[int]], communicator: int = 0) -> FakeGroup:
        handle: Any = SimpleNamespace(rank=lambda: 0, size=lambda: len(parts[0]))  # for libraries
        return FakeGroup(tuple(parts[0]), 0, handle, device=self.config.device, communicator=communicator)

    def _divide_experts(self) -> ExpertDivision:
        return FakeDivision(self)


@create_mesh.register(FakeConfig)
def _fake(config: FakeConfig, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None) -> FakeMesh:
    mesh = FakeMesh(config, 0, config.world, choose_device(device))
    mesh.set_nodes([rank // (config.node_size or config.world) for rank in range(config.world)])
    return mesh


class FakeDivision(ExpertDivision):
    """Experts with the fake routing."""

    _mesh: FakeMesh

    def _make(self, placement: ExpertPlacement) -> ExpertParallel:
        parallel = FakeExpertParallel(self._mesh.ep, placement)
        parallel.skew = self._mesh.config.skew
        return parallel


@dataclass
class FakeGroup(Group):
    """A group of which only rank 0 exists. As in PyTorch, asynchronous collectives run on a stream of their group, and
    hold their tensors until they are waited for."""

    device: FakeDevice | None = None
    communicator: int = 0

    @property
    def alone(self) -> bool:
        return self.size == 1

    def _run(self, name: str, *tensors: torch.Tensor) -> None:
        assert self.device is not None
        if tensors[0].is_cuda:
            self.device.launch(Launch("collective", name), tensors)
            if (name, self.size) not in self.device.connected:
                self.device.connected.add((name, self.size))
                self.device.outside += LINK_BYTES

    def _carried(
        self, name: str, result: torch.Tensor, *tensors: torch.Tensor, asynchronous: bool = True
    ) -> Callable[[], torch.Tensor]:
        if not asynchronous or not result.is_cuda:
            self._run(name, result, *tensors)
            return lambda: result
        assert self.device is not None
        before, after = torch.cuda.current_stream(), self.device.stream_of(self.ranks, self.communicator)
        after.wait_stream(before)
        with torch.cuda.stream(after):
            self._run(name, result, *tensors)
            done = torch.cuda.Event()
            done.record(after)
        held = list(tensors)

        def wait() -> torch.Tensor:
            torch.cuda.current_stream().wait_event(done)
            held.clear()
            return result

        return wait

    def _start_gather(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        gathered = rows.new_empty(self.size * rows.shape[0], *rows.shape[1:])
        return self._carried("all_gather", gathered, rows, asynchronous=asynchronous)

    def _start_reduce(self, rows: torch.Tensor, asynchronous: bool) -> Callable[[], torch.Tensor]:
        part = rows.new_empty(rows.shape[0] // self.size, *rows.shape[1:])
        return self._carried("reduce_scatter", part, rows, asynchronous=asynchronous)

    def _exchange(self, rows: torch.Tensor, send: list[int] | None, receive: list[int] | None) -> torch.Tensor:
        arrived = rows.new_empty(rows.shape[0] if receive is None else sum(receive), *rows.shape[1:])
        self._run("all_to_all", arrived, rows)
        return arrived

    def _start_exchange(
        self, rows: torch.Tensor, into: torch.Tensor, send: list[int], receive: list[int]
    ) -> Callable[[], None]:
        wait = self._carried("all_to_all", into, rows)

        def filled() -> None:
            wait()

        return filled

    def _exchange_pairs(
        self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]
    ) -> None:
        self._run("exchange", *(rows for rows, _ in (*sends, *receives)))

    def _send(self, rows: torch.Tensor, to: int) -> None:
        self._run("send", rows)

    def _recv(self, into: torch.Tensor, source: int) -> None:
        self._run("recv", into)
        if not into.is_cuda:
            into.fill_(1)  # a host says that a layer of pages is stored


class FakeExpertParallel(ExpertParallel):
    """Routing that sends each token to the maximum number of ranks, and equally many tokens to every rank; ``skew``
    times as many to this one."""

    skew = 1.0

    def __init__(self, group: Group, placement: ExpertPlacement):
        super().__init__(group, placement)
        self._seen = SimpleNamespace()  # the last tokens and pairs

    def counts(self, sent: torch.Tensor) -> Callable[[], tuple[RecvPlan, int]]:
        made_up: Callable[[], tuple[RecvPlan, int]] = this_thread.as_one(
            partial, FakeExpertParallel._made_up_counts, self, super().counts(sent)
        )
        return made_up

    def _made_up_counts(self, wait: Callable[[], object]) -> tuple[RecvPlan, int]:
        wait()
        total, size = self._seen.pairs, self.group.size
        each = [total // size] * size
        local_pairs = self._skewed(total)
        return RecvPlan(each, [self._skewed(n) for n in each], local_pairs), local_pairs

    def ways(self, sent: torch.Tensor, groups: NodeGroups, takers: torch.Tensor) -> Callable[[], list[Way]]:
        made_up: Callable[[], list[Way]] = this_thread.as_one(
            partial, FakeExpertParallel._made_up_ways, self, super().ways(sent, groups, takers), groups
        )
        return made_up

    def _made_up_ways(self, wait: Callable[[], list[Way]], groups: NodeGroups) -> list[Way]:
        """Each pair crosses to another node, if there are so many, and is passed on in its own row."""
        rounds, rail, inside = len(wait()), groups.rail.size, groups.node.size
        crossing = self._seen.tokens * min(rail, self._seen.pairs // max(1, self._seen.tokens))
        self._seen.passed = [self._skewed(n) for n in _even(self._seen.pairs, rounds)]
        return [
            Way(
                RecvPlan(
                    _even(rows, rail), _even(min(self._skewed(rows), rail * self._seen.tokens), rail), local_pairs
                ),
                RecvPlan(_even(local_pairs, inside), _even(local_pairs, inside), local_pairs),
                local_pairs,
                local_pairs,
            )
            for rows, local_pairs in zip(_even(crossing, rounds), self._seen.passed, strict=True)
        ]

    def local_pairs(self, local_ids: torch.Tensor, together: int) -> list[int]:
        parts, pairs = len(super().local_pairs(local_ids, together)), local_ids.numel()
        return _even(min(self._skewed(pairs // self.group.size), pairs), parts)

    def _skewed(self, balanced: int) -> int:
        """Number of tokens for this rank in place of a balanced number."""
        return int(self.skew * balanced)

    def plans(self, group: Group, sent: torch.Tensor) -> list[RecvPlan]:
        super().plans(group, sent)
        rounds, size = sent.shape[:2]
        if group is not self.group:  # inside a node
            return [RecvPlan(_even(n, size), _even(n, size), n) for n in _even(max(self._seen.passed), rounds)]
        total = self._seen.pairs // size * size
        send, receive = _even(total, rounds), _even(self._skewed(total), rounds)
        return [RecvPlan(_even(n, size), _even(m, size), m) for n, m in zip(send, receive, strict=True)]

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        self._seen.tokens, self._seen.pairs = len(topk_ids), topk_ids.numel()
        return super().to_physical(topk_ids)


def _even(total: int, parts: int) -> list[int]:
    return [total // parts + (part < total % parts) for part in range(parts)]
