"""The allocator of pages and the ledger of all ranks."""

from __future__ import annotations

import random
import sys
from array import array
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.pool import PageIndex, PagePool
from dsa_engine.engine.requests.decoding import Decoding
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.context_buckets import ContextBuckets, bucket_of, own_bucket
from dsa_engine.model.forward_batch import ShardTables
from dsa_engine.parallel.group import Group
from dsa_engine.sampling_params import SamplingParams


class Named(PagePool):
    """A pool whose digests are given as they are."""

    def __init__(self, pages: int, slots: int = 0, size: int = 1):
        self.index = PageIndex(copies=slots > 0)
        super().__init__(pages, slots, self.index, size=size)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.index.numbers

    def named(self, pages: Sequence[int], digests: list[bytes]) -> None:
        self.name(np.array(pages), self.index.make(digests))

    def released(self, pages: Sequence[int]) -> None:
        self.release(np.array(pages))

    def begun(self, digests: list[bytes], count: int) -> tuple[array[int], list[int]]:
        return self.begin(self.index.make(digests), count)

    def planned(self) -> list[tuple[bool, int, int]]:
        return [(one.to_host, *pair) for one in self.copies for pair in zip(one.pages, one.slots, strict=True)]

    def held(self, digests: list[bytes]) -> int:
        return self.count_held(self.index.make(digests))


def test_cached_pages_are_found_until_they_are_needed() -> None:
    pool, (a, b, c) = Named(3), (b"a", b"b", b"c")
    pool.named(pool.take(2), [a, b])
    pool.released([0, 1])
    assert pool.free == 3 and len(pool.unused[0]) == 1 and a in pool and b in pool and c not in pool
    assert pool.held([a, b]) == 0
    assert (
        pool.begun([a], 1) == pool.begun([a], 1) == (array("i", [0]), [])
        and pool.held([a, b, c]) == 1
        and pool.free == 2
    )
    assert pool.begun([c], 2) == (array("i", [2, 1]), [0]), "a free page before a cached one"
    assert a in pool and b not in pool, "the page of b has other rows now"
    pool.released([0])
    assert pool.free == 0, "another request holds it"
    pool.released([0])
    pool.released([2, 1])
    assert pool.free == 3 and len(pool.unused[0]) == 2
    pool.evict_all()
    pool.index.clear()
    assert pool.free == len(pool.unused[0]) == 3 and a not in pool


def test_the_least_recently_used_request_is_evicted_first_from_its_last_page_on() -> None:
    pool, names = Named(4), [bytes([n]) for n in range(4)]
    first, second = pool.take(2).tolist(), pool.take(2).tolist()
    pool.named(first + second, names)
    pool.released(second)
    pool.released(first)
    pool.released(pool.begun(names[2:3], 1)[0])
    evicted = [int(pool.take(1)[0]) for _ in range(4)]
    assert evicted == [second[1], first[1], first[0], second[0]]


def test_pages_that_come_and_go_stay_in_order() -> None:
    """As a plain list says, over many times the length of the pool's own."""
    pool, rng, order = Named(200), random.Random(0), list[int]()
    names = [bytes([n]) for n in range(200)]
    pool.named(pool.take(200), names)
    for page in range(200):
        pool.released([page])
        order.append(page)
    for _ in range(3000):
        some = rng.sample(order, rng.randint(1, 9))
        assert sorted(pool.begun([names[page] for page in some], len(some))[0]) == sorted(some)
        pool.released(some)
        order = [page for page in order if page not in some] + some[::-1]
        assert pool._cached[0].count == 200
    assert pool._cached[0].all().tolist() == order and pool.take(7).tolist() == order[:7]


def test_the_index_learns_what_pools_evict() -> None:
    forgotten: list[bytes] = []
    ledger = PageLedger(0, 4, 3, forgotten=forgotten.append)
    first, second, third = (Request(number, [0], SamplingParams()) for number in range(3))
    none = np.empty(0, np.int64)

    def having() -> dict[bytes, list[int]]:
        index = ledger.index
        return {digest: index.has[:, number].nonzero()[0].tolist() for digest, number in index.numbers.items()}

    ledger.begin(first, range(4), none, 2)
    ledger.name(first, [b"a", b"b"], 0)
    ledger.release(first)
    ledger.take(second, 3, 2)  # evicts the last page there
    assert having() == {b"a": [0, 1, 2, 3], b"b": [0, 1, 2]} and not forgotten
    ledger.release(second)
    ledger.begin(third, range(4), none, 3)
    assert not having() and forgotten == [b"b", b"a"]


def test_pages_of_a_group_lie_on_its_ranks_in_turn() -> None:
    """Short requests begin on the rank with most room, also after a hit; a full rank is left out."""
    pool = Named(4, size=3)
    first = pool.take(4).tolist()
    assert [page % 3 for page in first] == [0, 1, 2, 0] and [page // 3 for page in first] == [0, 0, 0, 1]
    assert [page % 3 for page in pool.take(1)] == [1]
    assert [page % 3 for page in pool.take(3, after=first[-1])] == [1, 2, 0]
    assert [page % 3 for page in pool.take(4)] == [2, 0, 1, 2]
    with pytest.raises(RuntimeError, match="1 pages asked for, 0 are free"):
        pool.take(1)
    pool.named(first, [b"a", b"b", b"c", b"d"])
    pool.released(first[1:3])
    hit, absent = pool.begun([b"b"], 2)
    assert [*hit] == first[1:3] and not absent and pool.held([b"a", b"b", b"c", b"d"]) == 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_request_has_as_many_pages_on_each_rank(size: int) -> None:
    """Within a page: also as it grows, and after a hit, while all ranks have room."""
    ledger = PageLedger(0, 4, 300, dcp_size=size)
    for number in range(20):
        request = Request(number, [0], SamplingParams())
        hits = [bytes([page]) for page in range(min(number, 7))]
        ledger.begin(request, range(4 // size), ledger.index.make(hits), 9 + number % 3)
        ledger.name(request, [bytes([page]) for page in range(len(hits), 9)], len(hits))
        request.owner = number % 4
        for _ in range(11):
            assert ledger.give(request, 1)
        for pages in ledger._held[request].values():
            on_ranks = [sum(page % size == rank for page in pages[len(hits) :]) for rank in range(size)]
            assert max(on_ranks) - min(on_ranks) <= 1
            assert len(set(pages)) == len(pages)
        assert ledger.held(request) == len(ledger._held[request][request.owner // size]) == 20 + number % 3


@pytest.mark.parametrize(
    ("pages", "even", "width"), [(9, True, 4), (9, False, 16), (17, False, 32), (33, True, 16), (33, False, 64)]
)
def test_tables_are_as_wide_as_the_pages_of_a_rank(pages: int, even: bool, width: int) -> None:
    """A step takes a longer context if they lie unevenly: here all on one rank."""
    ledger, decoding = PageLedger(0, 4, 50, dcp_size=4), Decoding(0, Capacity(4, 4, 50, 16, 4))
    if not even:
        taken = ledger.pools[0].take(200)
        ledger.pools[0].release(taken[taken % 4 == 0])
    request = Request(0, [0] * (16 * pages - 1), SamplingParams(max_tokens=17))
    ledger.begin(request, [0], np.empty(0, np.int64), pages)
    decoding.enter(request, ledger)
    assert (step := decoding.step()) is not None
    graph = bucket_of(step, ContextBuckets(1024, 16, fewest=16))
    assert graph is not None
    on_rank = max(sum(page % 4 == rank for page in request.pages) for rank in range(4))
    tables = ShardTables(16, torch.device("cpu"), Group((0, 1, 2, 3), 0, None), 50)
    assert tables.shape(1, graph.context) == (8, width) and on_rank <= width
    assert tables.shape(1, own_bucket(step).context) == (8, on_rank)


def test_rows_in_host_memory_come_back_on_their_rank() -> None:
    """Where that rank has no room, they are computed again."""
    pool, names = Named(2, slots=2, size=2), [b"a", b"b", b"c", b"d"]
    pages = pool.take(4).tolist()
    pool.named(pages, names)
    pool.released(pages)
    others = pool.take(4).tolist()
    slots = {page: slot for to_host, page, slot in pool.planned()}
    assert sorted(slots) == [0, 1, 2, 3] and all(page % 2 == slot % 2 for page, slot in slots.items())
    pool.copies = []
    pool.released([page for page in others if page % 2])
    numbers = pool.index.make(names)
    assert pool.free == 2 and pool.placed(numbers) == 0 and pool.placed(numbers[1:2]) == 1
    pool.released([page for page in others if not page % 2][:1])
    assert pool.placed(numbers) == 2
    back, absent = pool.begin(numbers[:2], 3)
    assert [page % 2 for page in back] == [0, 1, 1] and not absent
    wanted = [(False, page, slots[at]) for page, at in zip(back, pages[:2], strict=False)]
    assert sorted(pool.planned()) == sorted(wanted)


def test_host_memory_costs_no_function_a_page() -> None:
    """A prompt evicts pages to it, replaces copies in it, and brings them back."""

    def calls(count: int) -> int:
        called, ledger = Counter[str](), PageLedger(0, 4, count, slots=2 * count, dcp_size=2)
        for number in (0, 1, 2, 3, 1):
            digests = [b"%d %d" % (number, page) for page in range(2 * count)]
            sys.setprofile(lambda frame, event, _: called.update([event]))
            request = Request(number, [0], SamplingParams())
            numbers = ledger.usable(digests, [range(2)])[0]
            ledger.begin(request, range(2), numbers, 2 * count)
            ledger.name(request, digests[len(numbers) :], len(numbers))
            ledger.release(request)
            sys.setprofile(None)
            copies = Counter(one.to_host for one in ledger.moves([]).copies)
        assert len(numbers) == copies[False] * 2 == 2 * count, "the last one has come back, half of it on this rank"
        return called["call"]

    assert calls(100) - calls(20) < 80


def test_a_pool_fetches_from_the_rank_that_has_a_page() -> None:
    """Of two pools of two ranks each, the second one lacks a page that lies on rank 0, and gives it to rank 3."""
    ranks = [PageLedger(rank, 4, 3, dcp_size=2) for rank in range(4)]
    for ledger in ranks:
        first, second, other = (Request(number, [0] * 8, SamplingParams()) for number in range(3))
        ledger.begin(first, [0, 1], np.empty(0, np.int64), 1)
        ledger.name(first, [b"a"], 0)
        ledger.release(first, [1], forget_from=0)
        ledger.take(other, 1, 1)
        assert ledger.begin(second, [0, 1], ledger.index.find([b"a"]), 1) == {1: 1}
        (fetch,) = ledger.fetching(second)
        assert fetch[2:] == (0, 3)
        moves = ledger.moves([Chunk(second, 0, 0, range(4), fetches=(fetch,))])
        assert moves.exchanges and len(moves.sends) == len(moves.receives) == 4
        number = ledger._held[second][1][0] // 2
        assert moves.sends == ([[], [], [], [0]] if ledger._rank == 0 else [[]] * 4)
        assert moves.receives == ([[number], [], [], []] if ledger._rank == 3 else [[]] * 4)
