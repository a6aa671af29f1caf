"""Pages of all ranks in lock-step: no page is lost and no request starves, whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dsa_engine.engine.cache.disk import DiskLoads
from dsa_engine.engine.cache.pool import PageMoves
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.errors import CapacityError
from dsa_engine.sampling_params import SamplingParams
from page_world import AgreedAtOnce, FolderInMemory, Slots, SlowReader, Wish, World, crowd
from scheduling import chunks_of, launch, read


@dataclass
class Simulation:
    """All ranks' schedulers in lock-step, with a model that "samples" the position of the token."""

    world: World
    wishes: list[Wish]
    now: int = 0
    admitted: list[int] = field(default_factory=list)
    decoding_steps: int = 0  # steps while some request decodes
    prefill_steps: int = 0  # … that prefilled
    preempted: int = 0
    num_found: int = 0  # tokens that were not computed
    num_fetched: int = 0  # pages that one rank sent to another
    num_copied: int = 0  # pages copied to host memory or back
    num_spilled: int = 0

    def __post_init__(self) -> None:
        self.ranks = self.world.schedulers()
        self.hashes: dict[int, list[int]] = {}  # by request: hashes of its first tokens, 0, 1, … of them
        self.rows: list[dict[int, int]] = [
            {} for _ in self.ranks
        ]  # by slot: hash of the tokens that the row depends on
        self.host: list[dict[int, list[int]]] = [{} for _ in self.ranks]  # by slot of host memory: rows of a page
        self.copies: list[dict[int, Request]] = [{} for _ in self.ranks]  # each process has other objects
        self.folder, self.disks, self.random = FolderInMemory(), [], random.Random(len(self.wishes))
        for rank, scheduler in enumerate(self.ranks if self.world.disk else []):
            group = AgreedAtOnce(rank, tuple(range(self.world.world)))
            none = [[] for _ in self.ranks]
            flush = partial(self.move, none, only=rank)
            disk = DiskLoads(self.folder, scheduler.ledger, Slots(), group, lambda f=flush: (f(), f)[1])
            disk._reader = SlowReader(self.folder)
            scheduler.page_sources.append(disk)
            self.disks.append(disk)
        self.to_come = sorted(range(len(self.wishes)), key=lambda n: self.wishes[n].arrives)
        self.arrived: dict[int, int] = {}  # request: step

    def on_all(self, what: Any) -> None:
        for scheduler, mine in zip(self.ranks, self.copies, strict=True):
            what(scheduler, mine)

    def arrivals(self) -> None:
        while self.to_come and self.wishes[self.to_come[0]].arrives <= self.now:
            wish = self.wishes[self.to_come.pop(0)]
            number = len(self.arrived)
            self.arrived[number] = self.now

            def add(scheduler: Scheduler, mine: dict[int, Request], number: int = number, wish: Wish = wish) -> None:
                prompt = [position + 1000 * wish.document for position in range(wish.prompt)]
                for position in range(max(0, wish.prompt - wish.own), wish.prompt):
                    prompt[position] += 10000 * (1 + number)
                request = Request(number, prompt, SamplingParams(max_tokens=wish.output))
                if pages_for(wish.prompt + wish.output - 1, self.world.page_size) > scheduler.capacity.limit:
                    with pytest.raises(CapacityError):
                        scheduler.capacity.check(wish.prompt, wish.output)
                    return
                request.tracked, request.priority = mine is self.copies[0], wish.priority
                scheduler.add(request)
                mine[number] = request

            self.order.append(wish)
            self.on_all(add)

    def departures(self) -> None:
        for number, came in self.arrived.items():
            if self.order[number].leaves == self.now - came:
                self.on_all(lambda scheduler, mine, n=number: n in mine and self.end(scheduler, mine[n], "abort"))

    order: list[Wish] = field(default_factory=list)  # by request

    def end(self, scheduler: Scheduler, request: Request, reason: str) -> None:
        request.finish_reason = request.finish_reason or reason
        scheduler.finish(request)

    def live(self) -> list[Request]:
        return [s for s in self.copies[0].values() if s.finish_reason is None]

    def step(self) -> None:
        oldest = min(self.live(), key=lambda s: s.order)  # by priority
        lost, decoded = oldest.preemptions, any(s.prefilled for s in self.live())
        self.poll()
        if self.now % 3 == 0:  # a step is scheduled, and not launched before another one has been read
            self.on_all(lambda scheduler, _: scheduler.schedule())
            lost = oldest.preemptions
        scheduled = [scheduler.schedule() for scheduler in self.ranks]
        steps = [chunks_of(scheduler, step) for scheduler, step in zip(self.ranks, scheduled, strict=True)]
        chunks = steps[0]
        if not chunks and any(disk.pending for disk in self.disks):
            self.now += 1
            return
        assert chunks, "there is work, and nothing is done"
        assert all([key(c) for c in of_rank] == [key(c) for c in chunks] for of_rank in steps), "ranks disagree"
        prefills = [c for c in chunks if not c.request.prefilled]
        assert prefills in ([], chunks), "prefill and decode in one step"
        self.decoding_steps += decoded
        self.prefill_steps += bool(prefills) and any(s.prefilled for s in self.live())
        assert self.prefill_steps <= self.world.fraction * self.decoding_steps + 1e-6
        self.check_budgets(chunks, bool(prefills))
        assert oldest.preemptions == lost, "the oldest was preempted"
        if oldest.prefilled != bool(prefills) and oldest.pages:
            # It may enter in a step whose fetches are taken by requests that ran before it was preempted.
            assert oldest in [c.request for c in chunks] or any(c.fetches for c in chunks), "the oldest does not run"
        for chunk in chunks:
            computed = chunk.request.num_computed_tokens if prefills else chunk.request.num_known_tokens - 1
            assert chunk.start == computed, "a token is left out, or computed twice"
            if prefills and chunk.request.id not in self.admitted:
                self.admitted.append(chunk.request.id)
                self.num_found += chunk.start
        self.move(steps)
        for rank, of_rank in enumerate(steps):
            self.check_pages(rank, of_rank)
            if self.world.caching:
                self.check_rows(rank, of_rank)
        positions = {chunk.request.id: chunk.request.num_known_tokens for chunk in chunks}
        for rank, (scheduler, step, of_rank) in enumerate(zip(self.ranks, scheduled, steps, strict=True)):
            written = [(chunk, list(chunk.request.pages)) for chunk in of_rank if self.computes(rank, chunk)]
            read(scheduler, launch(scheduler, step), lambda request: positions[request.id])
            for chunk, pages in written:
                for position in range(chunk.start, chunk.end):
                    if (slot := self.slot(rank, pages, position)) is not None:
                        self.rows[rank][slot] = self.row(chunk.request, position)
        for request in self.live():
            if len(request.output) >= self.order[request.id].ends_after:
                self.on_all(lambda scheduler, mine, n=request.id: self.end(scheduler, mine[n], "length"))
        if self.disks:
            for chunk in chunks:
                self.store(chunk.request)
        self.now += 1

    def poll(self) -> None:
        for rank, disk in enumerate(self.disks):
            disk._reader.read_some(self.random, self.host[rank])
        if self.disks and self.disks[0].pending:
            values = torch.tensor([[disk._progress(one) for one in disk._searches[:8]] for disk in self.disks])
            for disk in self.disks:
                disk.group.values = values
                disk.poll()
            assert len({len(disk._searches) for disk in self.disks}) == 1

    def store(self, request: Request) -> None:
        """Puts the complete pages of a prompt in the folder, and now and then deletes one."""
        size, pages, owner = self.world.page_size, request.pages, request.owner
        if not request.prefilled or not pages or owner:
            return
        for number, digest in enumerate(request.digests.values[: len(request.prompt) // size]):
            page, rank = divmod(pages[number], self.world.dcp)
            self.folder.pages[digest] = [self.rows[rank][page * size + offset] for offset in range(size)]
            if self.random.random() < 0.05:
                del self.folder.pages[digest]

    def move(self, steps: list[list[Chunk]], only: int | None = None) -> None:
        """Does what the ranks' schedulers want to have copied and sent before the step computes."""
        size = self.world.page_size
        moves = [
            scheduler.ledger.moves(chunks) if only in (None, rank) else PageMoves([], [], [], False)
            for rank, (scheduler, chunks) in enumerate(zip(self.ranks, steps, strict=True))
        ]
        assert only is not None or not any(pool.copies for one in self.ranks for pool in one.ledger.pools)
        for rank, of_rank in enumerate(moves):
            rows, host = self.rows[rank], self.host[rank]
            for to_host, page, slot in of_rank.copies:
                if to_host and slot < 0:
                    assert page < self.world.pages <= -1 - slot < self.world.all_pages
                    rows |= {(-1 - slot) * size + offset: rows[page * size + offset] for offset in range(size)}
                    self.num_spilled += 1
                elif to_host:
                    host[slot] = [rows[page * size + offset] for offset in range(size)]
                else:
                    rows |= {page * size + offset: row for offset, row in enumerate(host[slot])}
            self.num_copied += len(of_rank.copies)
        for rank, of_rank in enumerate(moves):
            first = rank - rank % self.world.cp
            assert len(of_rank.sends) == (self.world.cp if of_rank.exchanges else 0)
            assert of_rank.exchanges == moves[first].exchanges, "the ranks of a group disagree"
            for pages in (of_rank.sends, of_rank.receives):
                assert sum(map(len, pages)) <= self.world.fetched
            for other, pages in enumerate(of_rank.receives):
                sent = moves[first + other].sends[rank - first]
                assert len(sent) == len(pages) and (first + other != rank or not pages)
                self.num_fetched += len(pages)
                for source, page in zip(sent, pages, strict=True):
                    for offset in range(size):
                        self.rows[rank][page * size + offset] = self.rows[first + other][source * size + offset]

    def slot(self, rank: int, pages: list[int], position: int) -> int | None:
        """Where a rank holds a row; None: another one of its group does."""
        page, holder = divmod(pages[position // self.world.page_size], self.world.dcp)
        here = holder == rank % self.world.dcp
        return page * self.world.page_size + position % self.world.page_size if here else None

    def computes(self, rank: int, chunk: Chunk) -> bool:
        """Whether a rank's group holds the rows that a chunk computes."""
        return any(one // self.world.dcp == rank // self.world.dcp for one in chunk.ranks)

    def row(self, request: Request, position: int) -> int:
        """Hash of the tokens that a row depends on."""
        request, hashes = self.copies[0][request.id], self.hashes.setdefault(request.id, [0])
        wanted = position + 2 + self.world.lookahead
        while len(hashes) < wanted:
            hashes.append(hash((hashes[-1], *request.tokens(len(hashes) - 1, 1))))
        return hashes[wanted - 1]

    def check_rows(self, rank: int, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            for position in range(chunk.start if self.computes(rank, chunk) and chunk.length else 0):
                slot = self.slot(rank, chunk.request.pages, position)
                assert slot is None or self.rows[rank][slot] == self.row(chunk.request, position), "rows of others"

    def check_digests(self) -> None:
        """Pages with one digest have equal rows on all ranks, and all ranks know of each other's."""
        size, dcp, rows_of = self.world.page_size, self.world.dcp, {}
        self.move([[] for _ in self.ranks])
        for pool in range(self.world.world // dcp):
            indices = [scheduler.ledger.index for scheduler in self.ranks]
            named = [
                {digest: int(one.page[pool, n]) for digest, n in one.numbers.items() if one.page[pool, n] >= 0}
                for one in indices
            ]
            assert all(one == named[0] for one in named)
            assert all(one.has[:, [*one.numbers.values()]].any(axis=0).all() for one in indices), "nobody has it"
            for digest, number in named[0].items():
                page, rank = divmod(number, dcp)
                content = [self.rows[pool * dcp + rank][page * size + offset] for offset in range(size)]
                assert rows_of.setdefault(digest, content) == content
            copies = [
                {digest: int(one.slot[pool, n]) for digest, n in one.numbers.items() if one.slot[pool, n] >= 0}
                for one in indices
                if self.world.slots
            ]
            assert all(one == copies[0] for one in copies)
            for digest, number in copies[0].items() if copies else ():
                slot, rank = divmod(number, dcp)
                content = self.host[pool * dcp + rank][slot]
                assert rows_of.setdefault(digest, content) == content

    def preempt(self, rng: random.Random) -> None:
        """Takes the pages from a running request, if any."""
        if running := [s for s in self.live() if s.num_computed_tokens]:
            request = rng.choice(running)
            self.on_all(lambda scheduler, mine: scheduler.preempt(mine[request.id]))
            assert not any(mine[request.id].pages for mine in self.copies), "it has to be admitted again"
            self.preempted += 1

    def check_budgets(self, chunks: list[Chunk], prefill: bool) -> None:
        assert len(chunks) <= self.world.seqs
        assert all(c.length >= 1 or c.fetches for c in chunks)
        for ranks in {c.ranks for c in chunks}:
            length = sum(c.length for c in chunks if c.ranks == ranks)
            assert len(ranks) == (self.world.cp if prefill else 1)
            assert not prefill or length <= self.world.tokens * self.world.cp
        assert prefill or all(c.end == len(c.request) for c in chunks)
        assert prefill or all(c.length == 1 for c in chunks)

    def check_pages(self, rank: int, chunks: list[Chunk]) -> None:
        scheduler = self.ranks[rank]
        pages = [page for request in self.copies[rank].values() for page in request.pages]
        assert self.world.caching or len(set(pages)) == len(pages), "two requests share a page"
        assert scheduler.free_pages == self.ranks[0].free_pages
        dcp = self.world.dcp
        assert scheduler.free_pages[rank // dcp] == self.world.all_pages * dcp - len(set(pages))
        if self.world.spilled:
            self.check_spilled(rank, chunks)
        for chunk in chunks:
            assert not self.computes(rank, chunk) or len(chunk.request.pages) * self.world.page_size >= chunk.end

    def check_spilled(self, rank: int, chunks: list[Chunk]) -> None:
        """What a decode step writes is resident, and requests that run have different hot rows."""
        scheduler, (size, dcp) = self.ranks[rank], (self.world.page_size, self.world.dcp)
        for chunk in chunks:
            pages = chunk.request.pages
            if chunk.request.prefilled and pages and self.computes(rank, chunk):
                assert max(pages[(chunk.start - self.world.lookahead) // size :]) < self.world.pages * dcp
        for pool, free in enumerate(scheduler.ledger.free_sets):
            held = [one.hot_set for one in scheduler.running if one.owner // dcp == pool]
            assert sorted(held + free) == list(range(scheduler.capacity.sets))

    def preempts_last(self, scheduler: Scheduler) -> None:
        """Checks that requests are preempted only if no page of the pool can spill."""
        preemptible, ledger, dcp = scheduler._preemptible, scheduler.ledger, self.world.dcp

        def checked(pool: int) -> Any:
            its = ledger.pools[pool]
            for one in ledger.holders(pool):
                pages = ledger.first_pages(one, pool, scheduler._front(one))
                for page in pages[its.spillable(pages)] if not ledger.fetching(one) else ():
                    assert not its._free_of(dcp + page % dcp), "a page could have spilled"
            return preemptible(pool)

        scheduler._preemptible = checked  # type: ignore[method-assign]


def key(chunk: Chunk) -> tuple[int, int, int, range]:
    return chunk.request.id, chunk.start, chunk.length, chunk.ranks


@pytest.mark.parametrize("tiers", [0, 1, 2, 3])  # none: no page is found; 2: host memory; 3: the disk
@settings(max_examples=60)
@given(preempts=st.booleans(), seed=st.integers(0, 2**32))
def test_every_request_ends_and_no_page_is_lost(tiers: int, preempts: bool, seed: int) -> None:
    run_to_its_end(tiers, preempts, seed)


@pytest.mark.parametrize("tiers", [0, 1, 2, 3])
@settings(max_examples=1)
@given(preempts=st.booleans(), seed=st.integers(0, 2**32))
def test_so_it_is_on_many_ranks(tiers: int, preempts: bool, seed: int) -> None:
    run_to_its_end(tiers, preempts, seed, large=True)


@pytest.mark.parametrize("tiers", [0, 2, 3])
@settings(max_examples=3)
@given(preempts=st.booleans(), seed=st.integers(0, 2**32))
def test_so_it_is_where_pages_spill(tiers: int, preempts: bool, seed: int) -> None:
    run_to_its_end(tiers, preempts, seed, spills=True)


@pytest.mark.slow
@settings(max_examples=1000)
@given(tiers=st.integers(0, 3), preempts=st.booleans(), seed=st.integers(0, 2**32))
def test_so_it_is_where_pages_spill_a_thousand_times(tiers: int, preempts: bool, seed: int) -> None:
    run_to_its_end(tiers, preempts, seed, spills=True)


def run_to_its_end(tiers: int, preempts: bool, seed: int, large: bool = False, spills: bool = False) -> None:
    rng = random.Random(seed)
    world, wishes = crowd(rng, tiers, large, spills)
    run = Simulation(world, wishes)
    for scheduler in run.ranks if spills else ():
        run.preempts_last(scheduler)
    while run.to_come or run.ranks[0].has_work:
        run.arrivals()
        run.departures()
        if preempts and run.preempted < 40 and rng.random() < 0.5:
            run.preempt(rng)
        if tiers == 3 and rng.random() < 0.2:  # as if another process had filled the folder
            run.on_all(lambda scheduler, _: scheduler.prefix_cache.reset())
        if run.ranks[0].has_work:
            run.step()
        else:
            run.now += 1
        assert run.now < 5000, "a request never ends"
    event(f"preempted: {min(run.ranks[0].preemptions, 3)}")
    event(f"tokens found: {min(run.num_found, 20) // 5 * 5}")
    event(f"pages read: {min(sum(disk.pages_read for disk in run.disks), 3)}")
    event(f"pages fetched: {min(run.num_fetched, 3)}, copied: {min(run.num_copied, 3)}")
    event(f"pages spilled: {min(run.num_spilled, 3)}")
    run.check_digests()
    while run.disks and run.disks[0].pending:
        run.poll()
    for scheduler, mine in zip(run.ranks, run.copies, strict=True):
        for pool in scheduler.ledger.pools:
            assert pool.host.free == world.slots * world.dcp, "host memory is lost"
        assert scheduler.preemptions == run.ranks[0].preemptions
        assert scheduler.free_pages == [world.all_pages * world.dcp] * (world.world // world.dcp)
        for number, request in mine.items():
            wanted = min(run.order[number].output, run.order[number].ends_after)
            assert request.output == list(range(len(request.prompt), len(request))), "a token was sampled twice"
            assert not request.pages and request.finish_reason in ("length", "abort")
            assert request.finish_reason == "abort" or len(request.output) == wanted
