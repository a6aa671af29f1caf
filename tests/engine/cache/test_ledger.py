"""The allocator of pages and the ledger of all ranks."""

from __future__ import annotations

from array import array

import pytest

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.pool import PageIndex, PagePool
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.sampling_params import SamplingParams


def test_cached_pages_are_found_until_they_are_needed() -> None:
    pool, (a, b, c) = PagePool(3), (b"a", b"b", b"c")
    pool.name(pool.take(2), [a, b])
    pool.release([0, 1])
    assert pool.free == 3 and len(pool.unused[0]) == 1 and a in pool and b in pool and c not in pool
    assert pool.count_held([a, b]) == 0
    assert (
        pool.begin([a], 1) == pool.begin([a], 1) == (array("i", [0]), [])
        and pool.count_held([a, b, c]) == 1
        and pool.free == 2
    )
    assert pool.begin([c], 2) == (array("i", [2, 1]), [0]), "a free page before a cached one"
    assert a in pool and b not in pool, "the page of b has other rows now"
    pool.release([0])
    assert pool.free == 0, "another request holds it"
    pool.release([0])
    pool.release([2, 1])
    assert pool.free == 3 and len(pool.unused[0]) == 2
    pool.evict_all()
    assert pool.free == len(pool.unused[0]) == 3 and a not in pool


def test_the_least_recently_used_request_is_evicted_first_from_its_last_page_on() -> None:
    pool, names = PagePool(4), [bytes([n]) for n in range(4)]
    first, second = pool.take(2), pool.take(2)
    pool.name(first + second, names)
    pool.release(second)
    pool.release(first)
    pool.release(pool.begin(names[2:3], 1)[0])
    evicted = [pool.take(1)[0] for _ in range(4)]
    assert evicted == [second[1], first[1], first[0], second[0]]


def test_the_index_learns_what_ranks_evict(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass for neighbours that lose the same pages: a prompt evicts thousands on every rank of its group."""
    forgotten: list[bytes] = []
    ledger, lost = PageLedger(0, 4, 3, forgotten=forgotten.append), PageIndex.lost
    passes: list[tuple[list[bytes], int]] = []
    monkeypatch.setattr(
        PageIndex, "lost", lambda index, digests, pools: (passes.append((digests, pools)), lost(index, digests, pools))
    )
    first, second, third = (Request(number, [0], SamplingParams()) for number in range(3))
    ledger.begin(first, range(4), [], 2)
    ledger.name(first, [b"a", b"b"], 0)
    ledger.release(first)
    ledger.take(second, 3, 2)  # evicts the last page there
    assert ledger.index.pools == {b"a": 0b1111, b"b": 0b0111} and not forgotten
    passes.clear()
    ledger.release(second)
    ledger.begin(third, range(4), [], 3)
    assert not ledger.index.pools and forgotten == [b"b", b"a"]
    assert [one for one in passes if one[0]] == [([b"b", b"a"], 0b0111), ([b"a"], 0b1000)]


def test_pages_of_a_group_lie_on_its_ranks_in_turn() -> None:
    """Short requests begin on the rank with most room, also after a hit; a full rank is left out."""
    pool = PagePool(4, size=3)
    first = pool.take(4)
    assert [page % 3 for page in first] == [0, 1, 2, 0] and [page // 3 for page in first] == [0, 0, 0, 1]
    assert [page % 3 for page in pool.take(1)] == [1]
    assert [page % 3 for page in pool.take(3, after=first[-1])] == [1, 2, 0]
    assert [page % 3 for page in pool.take(4)] == [2, 0, 1, 2]
    with pytest.raises(RuntimeError, match="1 pages asked for, 0 are free"):
        pool.take(1)
    pool.name(first, [b"a", b"b", b"c", b"d"])
    pool.release(first[1:3])
    hit, absent = pool.begin([b"b"], 2)
    assert hit == first[1:3] and not absent and pool.count_held([b"a", b"b", b"c", b"d"]) == 3


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_request_has_as_many_pages_on_each_rank(size: int) -> None:
    """Within a page: also as it grows, and after a hit, while all ranks have room."""
    ledger = PageLedger(0, 4, 300, dcp_size=size)
    for number in range(20):
        request = Request(number, [0], SamplingParams())
        hits = [bytes([page]) for page in range(min(number, 7))]
        ledger.begin(request, range(4 // size), hits, 9 + number % 3)
        ledger.name(request, [bytes([page]) for page in range(len(hits), 9)], len(hits))
        request.owner = number % 4
        for _ in range(11):
            assert ledger.give(request, 1)
        for pages in ledger._held[request].values():
            on_ranks = [sum(page % size == rank for page in pages[len(hits) :]) for rank in range(size)]
            assert max(on_ranks) - min(on_ranks) <= 1
            assert len(set(pages)) == len(pages)
        assert ledger.held(request) == len(ledger._held[request][request.owner // size]) == 20 + number % 3


def test_rows_in_host_memory_come_back_on_their_rank() -> None:
    """Where that rank has no room, they are computed again."""
    pool, names = PagePool(2, slots=2, size=2), [b"a", b"b", b"c", b"d"]
    pages = pool.take(4)
    pool.name(pages, names)
    pool.release(pages)
    others = pool.take(4)
    slots = {page: slot for to_host, page, slot in pool.copies}
    assert sorted(slots) == [0, 1, 2, 3] and all(page % 2 == slot % 2 for page, slot in slots.items())
    pool.copies = []
    pool.release([page for page in others if page % 2])
    assert pool.free == 2 and pool.placed(names) == 0 and pool.placed(names[1:2]) == 1
    pool.release([page for page in others if not page % 2][:1])
    assert pool.placed(names) == 2
    back, absent = pool.begin(names[:2], 3)
    assert [page % 2 for page in back] == [0, 1, 1] and not absent
    assert sorted(pool.copies) == [(False, page, slots[at]) for page, at in sorted(zip(back, pages[:2], strict=False))]


def test_a_pool_fetches_from_the_rank_that_has_a_page() -> None:
    """Of two pools of two ranks each, the second one lacks a page that lies on rank 0, and gives it to rank 3."""
    ranks = [PageLedger(rank, 4, 3, dcp_size=2) for rank in range(4)]
    for ledger in ranks:
        first, second, other = (Request(number, [0] * 8, SamplingParams()) for number in range(3))
        ledger.begin(first, [0, 1], [], 1)
        ledger.name(first, [b"a"], 0)
        ledger.release(first, [1], forget_from=0)
        ledger.take(other, 1, 1)
        assert ledger.begin(second, [0, 1], [b"a"], 1) == {1: 1}
        (fetch,) = ledger.fetching(second)
        assert fetch[2:] == (0, 3)
        moves = ledger.moves([Chunk(second, 0, 0, range(4), fetches=(fetch,))])
        assert moves.exchanges and len(moves.sends) == len(moves.receives) == 4
        number = ledger._held[second][1][0] // 2
        assert moves.sends == ([[], [], [], [0]] if ledger._rank == 0 else [[]] * 4)
        assert moves.receives == ([[number], [], [], []] if ledger._rank == 3 else [[]] * 4)
