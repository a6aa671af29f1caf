"""What a rank of a disaggregated run needs to prefill, or to decode."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsa_engine.config.fields import plain
from dsa_engine.engine.cache.link import PageReceiver, PageSender
from dsa_engine.engine.disaggregation.schedulers import DecodeScheduler, PrefillScheduler
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.options import EngineOptions, options_of_decode
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.agreement import Meeting
from dsa_engine.parallel.disaggregation import PageGroups, page_groups, part_options
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.group import Group, new_group


@dataclass(eq=False)
class Side:
    """One rank of the part that prefills, or of the part that decodes.

    Attributes:
        lines: groups for messages that go out and that come in. That to the decode side's leader has the other leader
            and all ranks of the decode side, which have a group to send by only.
        sender, receiver: of the pages; set by :meth:`connect`, one of them.
    """

    prefills: bool
    mesh: Mesh
    pages: PageGroups
    lines: list[Group]
    sender: PageSender | None = None
    receiver: PageReceiver | None = None

    @classmethod
    def of(cls, options: EngineOptions, mesh: Mesh, modules: int) -> Side | None:
        """Makes the groups of both parts; None if the run has one part. All ranks of the run call it."""
        prefill = options.parallel.prefill_ranks
        if prefill is None or not mesh.has_counterpart:
            return None
        if modules > 1:
            raise ValueError(
                f"prefill_ranks {prefill} is possible with one MTP module, not with {modules}: give "
                "num_speculative_tokens for one module, or leave prefill_ranks out"
            )
        ranks, timeout = mesh.run_ranks, options.parallel.timeout
        pages = page_groups(mesh.run_rank, ranks[:prefill], ranks[prefill:], mesh.device, timeout)
        prefills, lines = mesh.run_rank < prefill, []
        for members in ([0, *ranks[prefill:]], [0, prefill]):  # to the decode side and back; both leaders come first
            handle = new_group(members, timeout, "gloo")
            if mesh.run_rank in members:
                lines.append(Group(tuple(members), members.index(mesh.run_rank), handle))
        return cls(prefills, mesh, pages, lines[::-1] if mesh.run_rank == prefill else lines)

    @property
    def scheduler(self) -> type[PrefillScheduler] | type[DecodeScheduler]:
        return PrefillScheduler if self.prefills else DecodeScheduler

    def connect(self, cache: KVCache, layers: int) -> None:
        """Makes what sends or receives the pages of a cache of so many layers, those of MTP modules not counted."""
        if self.prefills:
            self.sender = PageSender(cache, self.pages, layers)
        else:
            self.receiver = PageReceiver(cache, self.pages)

    def fewest(self, pages: int) -> int:
        """The smallest of the numbers that all ranks of the run call this with: pages of those that hold a request."""
        meeting, timeout = Meeting(self.mesh.run_ranks, self.mesh.run_rank), self.mesh.config.timeout
        return int(meeting.hold(str(pages), lambda texts: min(texts.values(), key=int), timeout))


def own_options(options: EngineOptions) -> EngineOptions:
    """The options in force on this rank: those of its part, if the run has two."""
    prefill = options.parallel
    if prefill.prefill_ranks is None:
        return options
    decode = options_of_decode(options)
    if part_options(prefill, decode.parallel) is not prefill:
        return _without_library(decode, "moe_dispatch")  # no step of this part prefills
    options = replace(options, enforce_eager=True, async_scheduling=False)  # no step of this part decodes
    return _without_library(options, "decode_dispatch")


def _without_library(options: EngineOptions, name: str) -> EngineOptions:
    """The default dispatch for steps that never come, so that a library makes no buffer for them."""
    parallel = options.parallel
    if KINDS[getattr(parallel, name)].library is None:
        return options
    return replace(options, parallel=replace(parallel, **{name: plain(getattr(ParallelConfig, name))}))
