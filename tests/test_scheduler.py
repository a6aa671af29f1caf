"""The scheduler alone: order, budgets, pages, and that all ranks decide the same."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine.cache import PageAllocator, pages_for
from dsa_engine.errors import CapacityError
from dsa_engine.sampling import SamplingParams
from dsa_engine.scheduler import Scheduler
from dsa_engine.sequence import Chunk, Sequence


def make(
    *, rank: int = 0, world: int = 1, cp: int = 1, pages: int = 20, page_size: int = 4, seqs: int = 8, tokens: int = 16
) -> Scheduler:
    return Scheduler(
        rank=rank,
        world_size=world,
        cp_size=cp,
        pages=pages,
        page_size=page_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
    )


def request(number: int, prompt: int, output: int = 4) -> Sequence:
    return Sequence(number, list(range(prompt)), SamplingParams(max_tokens=output))


def step(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Runs a step as the engine does; returns ``(request, start, length)`` of its chunks."""
    chunks = scheduler.schedule()
    scheduler.computed(chunks)
    for chunk in chunks:
        sequence = chunk.sequence
        if chunk.end == len(sequence):
            sequence.output.append(0)
            if len(sequence.output) == sequence.params.max_tokens:
                sequence.finish_reason = "length"
                scheduler.finish(sequence)
    return [(c.sequence.id, c.start, c.length) for c in chunks]


def test_prefill_in_chunks_then_decode() -> None:
    scheduler = make(tokens=6)
    scheduler.add(request(0, 14, output=3))
    assert [step(scheduler) for _ in range(5)] == [[(0, 0, 6)], [(0, 6, 6)], [(0, 12, 2)], [(0, 14, 1)], [(0, 15, 1)]]
    assert not scheduler.has_work and scheduler.free_pages == [20]


def test_short_prompts_share_a_step() -> None:
    scheduler = make(tokens=10)
    for number, length in enumerate((3, 4, 8)):
        scheduler.add(request(number, length))
    assert step(scheduler) == [(0, 0, 3), (1, 0, 4), (2, 0, 3)]
    assert step(scheduler) == [(2, 3, 5)]  # prefill goes first; the others wait a step
    assert step(scheduler) == [(0, 3, 1), (1, 4, 1), (2, 8, 1)]


def test_a_request_that_comes_late_is_prefilled_at_once() -> None:
    scheduler = make()
    scheduler.add(request(0, 5))
    step(scheduler)
    step(scheduler)
    scheduler.add(request(1, 2))
    assert step(scheduler) == [(1, 0, 2)]
    assert step(scheduler) == [(0, 6, 1), (1, 2, 1)]


def test_most_requests_at_once() -> None:
    scheduler = make(seqs=2)
    for number in range(3):
        scheduler.add(request(number, 2, output=2))
    assert step(scheduler) == [(0, 0, 2), (1, 0, 2)]
    assert step(scheduler) == [(0, 2, 1), (1, 2, 1)]
    assert step(scheduler) == [(2, 0, 2)]


def test_nobody_overtakes_a_request_that_waits_for_pages() -> None:
    scheduler = make(pages=5, page_size=4)
    scheduler.add(request(0, 8, output=5))  # 3 pages of 5
    scheduler.add(request(1, 12, output=5))  # 4 pages: waits
    scheduler.add(request(2, 1, output=2))  # would fit
    assert step(scheduler) == [(0, 0, 8)]
    for _ in range(4):
        assert [c[0] for c in step(scheduler)] == [0]
    assert step(scheduler) == [(1, 0, 12), (2, 0, 1)]


def test_a_request_that_can_never_run() -> None:
    scheduler = make(pages=5, page_size=4)
    scheduler.add(request(0, 17, output=4))  # 20 tokens in the cache: the last sampled one never enters it
    with pytest.raises(
        CapacityError,
        match=r"17 prompt tokens and up to 5 new ones \(22 in all\) need 6 pages of 4 tokens, the cache has 5; "
        r"raise cache_memory by a factor of 1.20, shorten the prompt or lower max_tokens",
    ):
        scheduler.add(request(1, 17, output=5))
    assert step(scheduler) == [(0, 0, 16)]  # the other is not disturbed


def test_finishing_early_frees_pages_in_every_state() -> None:
    scheduler = make(tokens=4, seqs=2)
    running, prefilling, waiting = (request(n, 6) for n in range(3))
    for sequence in (running, prefilling, waiting):
        scheduler.add(sequence)
    step(scheduler)
    step(scheduler)
    assert running.prefilled and not prefilling.prefilled and not waiting.pages
    for sequence in (waiting, prefilling, running):
        scheduler.finish(sequence)
        scheduler.finish(sequence)  # twice does no harm
    assert not scheduler.has_work and scheduler.free_pages == [20]


def test_pages_of_a_group_and_of_the_owner_after_prefill() -> None:
    """All ranks of the group hold the prompt while it is prefilled; then its owner alone."""
    ranks = [make(rank=r, world=4, cp=2, tokens=8) for r in range(4)]
    sequences = [request(0, 12, output=9) for _ in ranks]
    for scheduler, sequence in zip(ranks, sequences, strict=True):
        scheduler.add(sequence)
        assert step(scheduler) == [(0, 0, 12)]  # 8 tokens a rank
    owner = sequences[0].owner
    assert {s.owner for s in sequences} == {owner} and {s.cp_group for s in sequences} == {owner // 2}
    assert [len(s.pages) for s in sequences] == [5 if r == owner else 0 for r in range(4)]
    assert ranks[0].free_pages == [15 if r == owner else 20 for r in range(4)]


def test_groups_share_the_load() -> None:
    scheduler = make(world=4, cp=1, tokens=10)
    sequences = [request(n, 10) for n in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    assert len(step(scheduler)) == 4
    assert sorted(s.owner for s in sequences) == [0, 1, 2, 3]


def test_allocator() -> None:
    allocator = PageAllocator(3)
    assert allocator.take(2) == [0, 1] and allocator.free == 1
    with pytest.raises(RuntimeError, match="2 pages asked for, 1 are free"):
        allocator.take(2)
    allocator.give_back([0, 1])
    assert allocator.free == 3 and sorted(allocator.take(3)) == [0, 1, 2]


@dataclass
class World:
    world: int
    cp: int
    pages: int
    page_size: int
    seqs: int
    tokens: int


WORLDS = st.builds(
    lambda group, groups, *rest: World(group * groups, group, *rest),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(4, 24),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 9),
)
# prompt, output, step at which it arrives, tokens after which it ends by itself (as an end token would end it)
REQUESTS = st.lists(
    st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 10), st.integers(1, 12)), min_size=1, max_size=9
)


@settings(max_examples=150, deadline=None)
@given(WORLDS, REQUESTS)
def test_every_rank_decides_the_same_and_nothing_leaks(world: World, requests: list[tuple[int, int, int, int]]) -> None:
    ranks = [
        make(
            rank=r,
            world=world.world,
            cp=world.cp,
            pages=world.pages,
            page_size=world.page_size,
            seqs=world.seqs,
            tokens=world.tokens,
        )  # fmt: skip
        for r in range(world.world)
    ]
    # A process has its own objects of the same requests.
    copies: list[list[Sequence]] = [[] for _ in ranks]
    arrivals = sorted(range(len(requests)), key=lambda n: requests[n][2])
    admitted: list[int] = []
    computed: dict[int, int] = {}
    now = 0
    while True:
        while arrivals and requests[arrivals[0]][2] <= now:
            number = arrivals.pop(0)
            prompt, output, _, _ = requests[number]
            fits = pages_for(prompt + output - 1, world.page_size) <= world.pages
            for scheduler, mine in zip(ranks, copies, strict=True):
                sequence = request(number, prompt, output)
                if fits:
                    scheduler.add(sequence)
                    mine.append(sequence)
                else:
                    with pytest.raises(CapacityError):
                        scheduler.add(sequence)
        if not arrivals and not ranks[0].has_work:
            break
        steps = [scheduler.schedule() for scheduler in ranks]
        if ranks[0].has_work:
            assert steps[0], "there is work, and nothing is done"
        decisions = [[(c.sequence.id, c.start, c.length, c.ranks) for c in chunks] for chunks in steps]
        assert all(decision == decisions[0] for decision in decisions)
        check_budgets(world, steps[0])
        for rank, (scheduler, chunks, mine) in enumerate(zip(ranks, steps, copies, strict=True)):
            pages = [page for sequence in mine for page in sequence.pages]
            assert len(set(pages)) == len(pages), "two requests share a page"
            assert scheduler.free_pages == ranks[0].free_pages
            assert scheduler.free_pages[rank] == world.pages - len(pages)
            for chunk in chunks:
                if rank in chunk.ranks:
                    assert len(chunk.sequence.pages) * world.page_size >= chunk.end
        for chunk in steps[0]:
            number = chunk.sequence.id
            assert chunk.start == computed.get(number, 0), "a token is left out, or computed twice"
            if number not in computed:
                admitted.append(number)
            computed[number] = chunk.end
        for scheduler, chunks in zip(ranks, steps, strict=True):
            scheduler.computed(chunks)
            for chunk in chunks:
                finish_or_go_on(scheduler, chunk, requests[chunk.sequence.id][3])
        now += 1
        assert now < 2000, "a request never ends"
    assert admitted == [sequence.id for sequence in copies[0]], "not in order of arrival"
    assert all(s.finish_reason == "length" and not s.pages for mine in copies for s in mine)
    assert all(scheduler.free_pages == [world.pages] * world.world for scheduler in ranks)


def finish_or_go_on(scheduler: Scheduler, chunk: Chunk, ends_after: int) -> None:
    sequence = chunk.sequence
    if not chunk.samples:
        return
    sequence.output.append(0)
    if len(sequence.output) >= min(ends_after, sequence.params.max_tokens):
        sequence.finish_reason = "length"
        scheduler.finish(sequence)


def check_budgets(world: World, chunks: list[Chunk]) -> None:
    assert len(chunks) <= world.seqs
    assert all(chunk.length >= 1 for chunk in chunks)
    prefill = [c for c in chunks if not c.sequence.prefilled]
    assert prefill in ([], chunks), "prefill and decode in one step"
    for group in {c.ranks for c in prefill}:
        assert len(group) == world.cp
        assert sum(c.length for c in prefill if c.ranks == group) <= world.tokens * world.cp
    if not prefill:
        assert all(c.length == 1 and len(c.ranks) == 1 for c in chunks)
