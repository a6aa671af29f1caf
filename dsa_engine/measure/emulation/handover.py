"""The handovers of an emulated rank of a run that prefills and decodes apart.

A rank that prefills packs and counts its part of the pages, as in a true run; their way is modelled. For a rank that
decodes the pages of its requests are counted, and modelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dsa_engine.engine.disaggregation.side import SendingTiers
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.measure.costs.handover import Handover, handover_of
from dsa_engine.measure.emulation.mesh import Part, emulated
from dsa_engine.model.cache.page_link import RankPages, dealt
from dsa_engine.model.cache.page_sender import PageSender
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.links import Links
from dsa_engine.system.sizes import format_bytes


def part_of(engine: Engine) -> Part | None:
    """The part of the run that an emulated rank belongs to; None: the run has one part, or nothing is emulated."""
    mesh = emulated(engine.mesh)
    return None if mesh is None else mesh.part


def modelled_handover(engine: Engine, tokens: int, ttft: float, links: Links) -> Handover:
    """The handover of a prompt to a rank on another machine, by the caches of an emulated rank of either part.

    Args:
        ttft: seconds of the prefill.
        links: those between machines carry it.
    """
    cache, mesh = engine.cache, engine.mesh
    step = engine.options.max_num_batched_tokens * mesh.cp_size
    token_bytes, rate = cache.page_bytes // cache.page_size, links.between.bandwidth_gb_s * 1e9
    return handover_of(tokens, cache.page_size, token_bytes, len(cache.latent), step, rate, ttft)


class _LooseEnd(Group):
    """A link to a rank that does not exist."""

    def _send(self, rows: torch.Tensor, to: int) -> None:
        pass


class EmulatedSending(SendingTiers):
    """Lets pages leave as the loop of the part that prefills does where the other part has room: from the second step
    of a prompt on, or after its only one."""

    def __init__(self, engine: Engine):
        self._link = _LooseEnd((0, 1), 0, None)
        sender = PageSender(engine.cache, {1: self._link}, len(engine.model.layers))
        super().__init__(engine.cache, engine.scheduler.ledger, sender)
        self._mesh, self._size, self._gone = engine.mesh, engine.cache.page_size, dict[Request, int]()
        self.leaving = self._under
        engine.cache.sender, engine.tiers = sender, self

    @property
    def bytes_sent(self) -> int:
        """Bytes of the pages that have left; waits for those under way."""
        self._sender.close()
        return self._link.bytes_sent

    @contextmanager
    def moving(self, chunks: Sequence[Chunk], overlapped: bool = False) -> Iterator[None]:
        with super().moving(chunks, overlapped):
            yield
        only = [chunk for chunk in chunks if chunk.start == 0 and _is_last(chunk)]
        self._sender.begin([self._part(chunk) for chunk in only])
        self._sender.finish()
        self._sender.poll()

    def _under(self, chunks: Sequence[Chunk]) -> list[RankPages]:
        return [self._part(chunk) for chunk in chunks if chunk.start > 0 and not chunk.request.prefilled]

    def _part(self, chunk: Chunk) -> RankPages:
        """This rank's part of the pages that are complete with a chunk and have not left."""
        request, last = chunk.request, _is_last(chunk)
        first = self._gone.pop(request, 0)
        end = pages_for(chunk.end, self._size) if last else chunk.end // self._size
        if not last:
            self._gone[request] = end
        ranks = chunk.ranks
        own = (
            dealt(request.pages[first:end], ranks.index(self._mesh.rank), len(ranks))
            if self._mesh.rank in ranks
            else []
        )
        return RankPages(request.id, 1, own)


def _is_last(chunk: Chunk) -> bool:
    return 0 < chunk.request.num_prefill_tokens <= chunk.end


def sending(engine: Engine) -> EmulatedSending | None:
    """What an emulated rank that prefills sends; None: it is none."""
    return engine.tiers if isinstance(engine.tiers, EmulatedSending) else None


def handover_json(handover: Handover | None, part: str, of_rank: int) -> dict[str, Any]:
    """The key "handover" of a result: one request's, and the bytes that this rank sends or receives for it."""
    if handover is None:
        return {}
    return {"handover": handover.to_json() | {"bytes_sent" if part == "prefill" else "bytes_received": of_rank}}


def handover_line(handover: Handover, part: str, of_rank: int) -> str:
    """The same for people."""
    own = f"of which this rank sends {format_bytes(of_rank)}" if part == "prefill" else "all to this rank"
    after = f", {handover.exposed * 1e3:.3g} ms of it after the prefill" if part == "prefill" else ""
    return (
        f"Handover of a request: {handover.pages:,} pages, {format_bytes(handover.nbytes)}, {own}; "
        f"{handover.seconds * 1e3:.3g} ms on the link of the rank that decodes{after} (modelled)"
    )
