"""Pages: the allocator and the ledger of all ranks; no page is lost and no request starves, whatever happens."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from dsa_engine.engine.requests.pages import Capacity, PageAllocator, PageLedger, pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.errors import CapacityError
from dsa_engine.sampling_params import SamplingParams


def test_allocator() -> None:
    allocator = PageAllocator(3)
    assert allocator.take(2) == [0, 1] and allocator.free == 1
    with pytest.raises(RuntimeError, match="2 pages asked for, 1 are free"):
        allocator.take(2)
    allocator.give_back([0, 1])
    assert allocator.free == 3 and sorted(allocator.take(3)) == [0, 1, 2]


@given(st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=30))
def test_allocator_never_gives_a_page_twice(pages: int, calls: list[tuple[bool, int]]) -> None:
    allocator, out = PageAllocator(pages), []
    for take, count in calls:
        if not take:
            allocator.give_back(out[:count])
            del out[:count]
        elif count <= pages - len(out):
            out += allocator.take(count)
        else:
            with pytest.raises(RuntimeError, match=f"{count} pages asked for, {pages - len(out)} are free"):
                allocator.take(count)
        assert len(set(out)) == len(out) == pages - allocator.free
        assert set(out) <= set(range(pages))


@given(
    st.integers(1, 3),
    st.integers(1, 12),
    st.lists(st.tuples(st.sampled_from("tra"), st.integers(0, 3), st.integers(0, 2), st.integers(0, 5)), max_size=30),
)
def test_ledgers_of_all_ranks_agree(world: int, pages: int, calls: list[tuple[str, int, int, int]]) -> None:
    ledgers = [PageLedger(rank, world, pages) for rank in range(world)]
    copies = [[Request(n, [0], SamplingParams()) for n in range(4)] for _ in ledgers]
    for call, number, where, count in calls:
        rank = where % world
        for ledger, mine in zip(ledgers, copies, strict=True):
            if call == "r":
                ledger.release(mine[number], rank)
            elif call == "a":
                ledger.release_all(mine[number])
            elif count <= ledger.free[rank]:
                ledger.take(mine[number], rank, count)
            else:
                with pytest.raises(RuntimeError, match=rf"{count} pages asked for on rank {rank}, \d+ are free"):
                    ledger.take(mine[number], rank, count)
        for rank, (ledger, mine) in enumerate(zip(ledgers, copies, strict=True)):
            own = [page for request in mine for page in request.pages]
            assert len(set(own)) == len(own) == pages - ledger.own_free
            assert ledger.free == ledgers[0].free and ledger.free[rank] == ledger.own_free
            assert [len(s.pages) for s in mine] == [ledger.held(s, rank) for s in mine]
            assert {s.id for s in mine if s.pages} <= {s.id for s in ledger.holders(rank)}


@dataclass
class World:
    world: int
    cp: int
    pages: int
    page_size: int
    seqs: int
    tokens: int
    fraction: float

    def schedulers(self) -> list[Scheduler]:
        return [
            Scheduler(
                Capacity(self.world, self.cp, self.pages, self.page_size),
                rank=rank,
                max_num_seqs=self.seqs,
                max_num_batched_tokens=self.tokens,
                max_prefill_share=self.fraction,
            )
            for rank in range(self.world)
        ]


@dataclass
class Wish:
    """A request made by hypothesis."""

    prompt: int
    output: int
    arrives: int  # its step of arrival
    ends_after: int  # tokens after which it ends, as by an end token
    leaves: int | None  # steps after which it ends, as by a closed stream


def crowd(rng: random.Random) -> tuple[World, list[Wish]]:
    """Requests that need more than the cache together, so that runs preempt as a rule."""
    cp, page_size, pages = rng.randint(1, 3), rng.randint(1, 4), rng.randint(3, 12)
    world = World(
        world=cp * rng.randint(1, 3),
        cp=cp,
        pages=pages,
        page_size=page_size,
        seqs=rng.randint(1, 8),
        tokens=rng.randint(1, 12),
        fraction=rng.choice([1.0, 0.9, 0.5, 0.3, 0.05]),
    )
    room = pages * page_size
    wishes = [
        Wish(
            prompt=rng.randint(1, max(1, room // 2)),
            output=rng.randint(1, room * 3 // 4),
            arrives=rng.randint(0, 12),
            ends_after=rng.choice([room, room, rng.randint(1, room)]),
            leaves=rng.choice([None, None, None, rng.randint(0, 40)]),
        )
        for _ in range(rng.randint(1, 4 + 4 * world.world))
    ]
    return world, wishes


@dataclass
class Simulation:
    """All ranks' schedulers in lock-step, with a model that "samples" the position of the token."""

    world: World
    wishes: list[Wish]
    now: int = 0
    admitted: list[int] = field(default_factory=list)
    decoding_steps: int = 0  # steps while some request decodes
    prefill_steps: int = 0  # … that prefilled
    rewound: int = 0  # number of rewinds

    def __post_init__(self) -> None:
        self.ranks = self.world.schedulers()
        self.copies: list[dict[int, Request]] = [{} for _ in self.ranks]  # each process has other objects
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
                request = Request(number, list(range(wish.prompt)), SamplingParams(max_tokens=wish.output))
                if pages_for(wish.prompt + wish.output - 1, self.world.page_size) > self.world.pages:
                    with pytest.raises(CapacityError):
                        scheduler.capacity.check(wish.prompt, wish.output)
                    return
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
        oldest = min(self.live(), key=lambda s: s.id)
        lost, decoded = oldest.preemptions, any(s.prefilled for s in self.live())
        if self.now % 3 == 0:  # a step is scheduled, and not launched before another one has been read
            self.on_all(lambda scheduler, _: scheduler.schedule())
            lost = oldest.preemptions
        steps = [scheduler.schedule() for scheduler in self.ranks]
        chunks = steps[0]
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
            assert oldest in [c.request for c in chunks], "the oldest does not run"
        for chunk in chunks:
            assert chunk.start == chunk.request.num_computed_tokens, "a token is left out, or computed twice"
            if chunk.start == 0 and chunk.request.id not in self.admitted:
                self.admitted.append(chunk.request.id)
        for rank, of_rank in enumerate(steps):
            self.check_pages(rank, of_rank)
        for scheduler, of_rank in zip(self.ranks, steps, strict=True):
            scheduler.computed(of_rank)
            for chunk in of_rank:
                if chunk.num_logits:
                    self.sampled(scheduler, chunk.request)
        self.now += 1

    def sampled(self, scheduler: Scheduler, request: Request) -> None:
        request.output.append(len(request))
        if len(request.output) >= min(self.order[request.id].ends_after, request.params.max_tokens):
            self.end(scheduler, request, "length")

    def rewind(self, rng: random.Random) -> None:
        """Rewinds a running request: not at all, in part, or to its beginning."""
        running = [s for s in self.live() if s.num_computed_tokens]
        if not running:
            return
        request = rng.choice(running)
        first = request.num_prefill_tokens if request.prefilled else 0
        to = rng.choice([0, rng.randint(first, request.num_computed_tokens)])
        pages = [len(mine[request.id].pages) for mine in self.copies]
        self.on_all(lambda scheduler, mine: scheduler.rewind(mine[request.id], to))
        if to:
            assert pages == [len(mine[request.id].pages) for mine in self.copies], "its pages stay"
        else:
            assert not any(mine[request.id].pages for mine in self.copies), "it has to be admitted again"
        assert request.num_computed_tokens == to
        self.rewound += 1

    def check_budgets(self, chunks: list[Chunk], prefill: bool) -> None:
        assert len(chunks) <= self.world.seqs
        assert all(c.length >= 1 for c in chunks)
        for ranks in {c.ranks for c in chunks}:
            length = sum(c.length for c in chunks if c.ranks == ranks)
            assert len(ranks) == (self.world.cp if prefill else 1)
            assert not prefill or length <= self.world.tokens * self.world.cp
        assert prefill or all(c.end == len(c.request) for c in chunks)
        assert prefill or self.rewound or all(c.length == 1 for c in chunks)

    def check_pages(self, rank: int, chunks: list[Chunk]) -> None:
        scheduler = self.ranks[rank]
        pages = [page for request in self.copies[rank].values() for page in request.pages]
        assert len(set(pages)) == len(pages), "two requests share a page"
        assert scheduler.free_pages == self.ranks[0].free_pages
        assert scheduler.free_pages[rank] == scheduler.ledger.own_free == self.world.pages - len(pages)
        for chunk in chunks:
            assert rank not in chunk.ranks or len(chunk.request.pages) * self.world.page_size >= chunk.end


def key(chunk: Chunk) -> tuple[int, int, int, range]:
    return chunk.request.id, chunk.start, chunk.length, chunk.ranks


@pytest.mark.parametrize("rewinds", [False, True])
@settings(max_examples=300)
@given(seed=st.integers(0, 2**32))
def test_every_request_ends_and_no_page_is_lost(rewinds: bool, seed: int) -> None:
    rng = random.Random(seed)
    world, wishes = crowd(rng)
    run = Simulation(world, wishes)
    while run.to_come or run.ranks[0].has_work:
        run.arrivals()
        run.departures()
        if rewinds and run.rewound < 40 and rng.random() < 0.5:
            run.rewind(rng)
        if run.ranks[0].has_work:
            run.step()
        else:
            run.now += 1
        assert run.now < 5000, "a request never ends"
    event(f"preempted: {min(run.ranks[0].preemptions, 3)}")
    event(f"rewound: {min(run.rewound, 3)}")
    assert run.admitted == sorted(run.admitted), "not in order of arrival"
    for scheduler, mine in zip(run.ranks, run.copies, strict=True):
        assert scheduler.preemptions == run.ranks[0].preemptions
        assert scheduler.free_pages == [world.pages] * world.world and scheduler.ledger.own_free == world.pages
        for number, request in mine.items():
            wanted = min(run.order[number].output, run.order[number].ends_after)
            assert request.output == list(range(len(request.prompt), len(request))), "a token was sampled twice"
            assert not request.pages and request.finish_reason in ("length", "abort")
            assert request.finish_reason == "abort" or len(request.output) == wanted
