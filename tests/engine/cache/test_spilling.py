"""Pages that spill: the pool beside a plain list of pages, and what requests get."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dsa_engine import ParallelConfig
from dsa_engine.engine.cache.pool import PageIndex, PagePool
from dsa_engine.engine.cache.sizes import HotBytes
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.errors import CapacityError
from dsa_engine.sampling_params import SamplingParams
from scheduling import run_step


def planned(pool: PagePool) -> list[tuple[bool, int, int]]:
    return [(one.to_host, *pair) for one in pool.copies for pair in zip(one.pages, one.slots, strict=True)]


class PlainPages:
    """What every page of a pool holds, and which requests hold it."""

    def __init__(self, pages: int, spilled: int, slots: int, size: int):
        self.resident, self.all = pages * size, (pages + spilled) * size
        self.index, self.size = PageIndex(copies=slots > 0), size
        self.pool = PagePool(pages, slots, self.index, size=size, spilled=spilled)
        self.content: dict[int, bytes] = {}  # by page
        self.host: dict[int, bytes] = {}  # by slot
        self.requests: dict[int, tuple[array[int], list[bytes]]] = {}  # pages, and the digests of the first ones

    def copy(self) -> None:
        for to_host, page, slot in planned(self.pool):
            assert slot < 0 or page % self.size == slot % self.size
            if to_host and slot < 0:
                assert page < self.resident <= -1 - slot < self.all and (page - -1 - slot) % self.size == 0
                self.content[-1 - slot] = self.content[page]
            elif to_host:
                assert page < self.resident, "a spilled page is evicted without a copy"
                self.host[slot] = self.content[page]
            else:
                self.content[page] = self.host[slot]
        self.pool.copies = []

    def write(self, number: int) -> None:
        """Computes and names what a request has not found."""
        self.copy()
        pages, digests = self.requests[number]
        for index, page in enumerate(pages):
            if index >= len(digests):
                self.content[page] = b"%d of %d" % (index, number)
            elif self.content.get(page) != digests[index]:
                self.content[page] = digests[index]
        self.pool.name(np.array(pages[: len(digests)], np.int64), self.index.make(digests))

    def check(self) -> None:
        held = {page for pages, _ in self.requests.values() for page in pages}
        pool = self.pool
        cached = [page for one in pool._cached for page in one.all().tolist()]
        unused = [page for one in pool.unused for page in one]
        assert sorted([*held, *cached, *unused]) == list(range(self.all)), "a page is lost, or is in two lists"
        assert pool.free + pool.free_spilled == self.all - len(held)
        for region, pages in enumerate(pool.unused):
            of = [*pages, *pool._cached[region].all().tolist()]
            assert all(page % self.size + self.size * (page >= self.resident) == region for page in of)
        for digest, number in self.index.numbers.items():
            page = int(self.index.page[0, number])
            assert page < 0 or self.content[page] == digest, "a digest leads to other rows"
            assert page >= 0 or int(pool.host.slots_of(np.array([number]))[0]) >= 0
        for number, (pages, digests) in self.requests.items():
            rows = [*digests, *(b"%d of %d" % (index, number) for index in range(len(digests), len(pages)))]
            assert [self.content[page] for page in pages] == rows, "a request has lost its rows"


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("slots", [0, 3])
def test_no_page_is_lost_and_digests_lead_to_their_rows(size: int, slots: int) -> None:
    rng, spilled, hits = random.Random(7 * size + slots), 0, 0
    plain = PlainPages(6, 9, slots, size)
    pool = plain.pool
    for number in range(500):
        what = rng.random()
        if what < 0.45:
            begins = [b"%d:%d" % (rng.randrange(4), index) for index in range(rng.randint(1, 6))]
            begins = [begins[0][:2] + one[2:] for one in begins]  # of one document
            numbers = plain.index.find(begins)
            numbers = numbers[: pool.placed(numbers)] if slots else numbers
            room = pool.room_beside(numbers)
            count = len(begins) + rng.randint(0, 5)
            if room.absent + count - len(numbers) <= int(room.resident.sum() + room.spilled.sum()):
                pages, absent = pool.begin(numbers, count)
                assert len(set(pages)) == count and not absent
                hits += sum(page >= plain.resident for page in pages[: len(numbers)])
                new = list(pages[len(numbers) :])
                assert sorted(new, key=lambda page: page < plain.resident) == new, "the last ones are resident"
                plain.requests[number] = pages, begins
                plain.write(number)
        elif what < 0.75 and plain.requests:
            chosen = rng.choice([*plain.requests])
            pages, digests = plain.requests[chosen]
            held = np.array(pages, np.int64)
            others = {page for one, (its, _) in plain.requests.items() if one != chosen for page in its}
            room, limit, wanted = [pool._free_of(size + rank) for rank in range(size)], rng.randint(1, 4), list[int]()
            for index, page in enumerate(pages):
                if page < plain.resident and page not in others and room[page % size] and len(wanted) < limit:
                    room[page % size] -= 1
                    wanted.append(index)
            held = pool.spill(held, limit)
            new = [index for index, page in enumerate(pages) if held[index] != page]
            assert new == wanted, "the first ones that one request holds, as long as there is room on their ranks"
            assert all(old % size == page % size for old, page in zip(pages, held.tolist(), strict=True))
            plain.requests[chosen] = array("i", held.tolist()), digests
            spilled += len(new)
            plain.copy()
        elif plain.requests:
            pages, _ = plain.requests.pop(rng.choice([*plain.requests]))
            pool.release(np.array(pages, np.int64))
        plain.check()
    assert spilled > 50 and hits > 20
    for pages, _ in plain.requests.values():
        pool.release(np.array(pages, np.int64))
    plain.requests.clear()
    pool.evict_all()
    plain.index.clear()
    plain.check()


def scheduler_of(pages: int, spilled: int, requests: int = 4) -> Scheduler:
    capacity = Capacity(1, 1, pages, 4, spilled=spilled, sets=requests if spilled else 0)
    return Scheduler(capacity, rank=0, max_num_seqs=requests, max_num_batched_tokens=200, max_prefill_share=0.5)


def test_requests_for_which_the_device_has_no_room_run_at_once() -> None:
    """Four of 60 tokens, in a cache with resident pages for one and a half of them; the last pages stay resident."""
    scheduler = scheduler_of(24, 60)
    for number in range(4):
        scheduler.add(Request(number, [number * 100 + token for token in range(30)], SamplingParams(max_tokens=30)))
    largest, before = 0, {}
    while scheduler.has_work:
        run_step(scheduler, len)
        for request in scheduler.running:
            old, list_before = before.get(request, ([], None))
            if [*request.pages[: len(old)]] != old:
                assert request.pages is not list_before, "steps in flight have the old list"
            before[request] = [*request.pages], request.pages
            front = scheduler._front(request)
            assert all(page < 24 for page in request.pages[front:])
        largest = max(largest, scheduler.num_running)
        sets = [request.hot_set for request in scheduler.running]
        assert len(set(sets)) == len(sets)
    assert largest == 4 and not scheduler.preemptions and scheduler.spilling is not None
    assert scheduler.spilling.spilled > 20 and scheduler.free_pages == [84] and scheduler.cache_usage == 0
    assert sorted(scheduler.ledger.free_sets[0]) == [0, 1, 2, 3]


def test_the_first_pages_of_a_long_prompt_spill_as_it_enters() -> None:
    """Without a copy, as it begins with spilled pages; once they are computed, others spill for the next request."""
    scheduler = scheduler_of(8, 40)
    first = Request(0, [*range(120)], SamplingParams(max_tokens=9))
    second = Request(1, [*range(500, 540)], SamplingParams(max_tokens=2))
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler, len)
    assert [page >= 8 for page in first.pages] == [True] * 22 + [False] * 8 and not second.pages
    pool = scheduler.ledger.pools[0]
    assert pool.free == 0 and not pool.copies
    run_step(scheduler, len)
    assert [page for _, page, _ in planned(pool)] == [0, 1, 2, 3, 4, 5] and len(first.pages) == 31
    run_step(scheduler, len)
    assert [page >= 8 for page in second.pages] == [True] * 5 + [False] * 5
    with pytest.raises(CapacityError, match=r"has 48; raise cache_memory and host_cache_memory by a factor of 1\.04"):
        scheduler.capacity.check(191, 8)


HOT: dict[str, Any] = {"hot_rows": 32, "host_cache_memory": "4MiB", "page_size": 4, "max_num_seqs": 3}


def test_the_device_has_what_was_counted(tiny_llm: Callable[..., Any]) -> None:
    """Hot rows first, then index keys and tables of spilled pages, then resident pages; host memory has the rest."""
    for sizes in ({"max_model_len": 100}, {"max_model_len": 3000}, {"max_num_seqs": 8}):
        llm = tiny_llm(900, **HOT | {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}} | sizes)
        prepared, cache, capacity = llm.engine.options, llm.engine.cache, llm.engine.scheduler.capacity
        config = llm.engine.model.config.with_mtp(1)
        of = HotBytes.of(config, cache.format, 4, capacity.sets, 32)
        taken = cache.bytes + cache.hot.device_bytes
        assert taken == of.rows + cache.pages * of.page + cache.spilled * of.keys <= prepared.cache_memory
        useful = prepared.max_num_seqs * -(-prepared.max_model_len // 4)
        assert useful <= cache.pages + cache.spilled <= useful + 2 or taken > prepared.cache_memory - of.page
        host = cache.spilled * of.latent + llm.engine.scheduler.ledger.slots * of.page
        assert (4 << 20) - of.page < host <= 4 << 20
        llm.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_cache_memory": None}, r"^hot_rows is 32; it is a number of latent rows that needs host_cache_memory"),
        ({"hot_rows": -1}, r"^hot_rows is -1; it is a number"),
        (
            {"hot_rows": 15},
            r"^hot_rows is 15: a step selects index_topk 16 rows for a token, .*; give at least 16, or 0",
        ),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
            r"up to 3 of a request with 2 drafts; give at least 48, or 0",
        ),
        (
            {"hf_overrides": {"model_type": "deepseek_v3"}},
            r"^hot_rows is 32, and 'deepseek_v3' has layers that read all tokens",
        ),
        (
            {"parallel": ParallelConfig(prefill_ranks=1)},
            r"^hot_rows is 32, and prefill_ranks 1: ranks that only decode",
        ),
        (
            {"hot_rows": 200},
            r"^the caches are too small for hot_rows 200: 3 sets .* so there are 0 resident pages of at",
        ),
        (
            {"host_cache_memory": 6000},
            r"0 spilled ones of at least 1; raise cache_memory or host_cache_memory, or lower",
        ),
    ],
)
def test_what_hot_rows_need(options: dict[str, Any], says: str, tiny_llm: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_llm(400, **HOT | options)


def test_a_request_waits_for_hot_rows() -> None:
    scheduler = scheduler_of(8, 40, requests=2)
    for number in range(3):
        scheduler.add(Request(number, [number] * 9, SamplingParams(max_tokens=3)))
    run_step(scheduler, len)
    assert [request.hot_set for request in scheduler.running] == [0, 1] and len(scheduler.waiting) == 1
