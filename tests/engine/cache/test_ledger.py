"""The allocator of pages and the ledger of all ranks."""

from __future__ import annotations

from array import array

import pytest

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.pool import PageIndex, PagePool
from dsa_engine.engine.requests.request import Request
from dsa_engine.sampling_params import SamplingParams


def test_cached_pages_are_found_until_they_are_needed() -> None:
    pool, (a, b, c) = PagePool(3), (b"a", b"b", b"c")
    pool.name(pool.take(2), [a, b])
    pool.release([0, 1])
    assert pool.free == 3 and len(pool.unused) == 1 and a in pool and b in pool and c not in pool
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
    assert pool.free == 3 and len(pool.unused) == 2
    pool.evict_all()
    assert pool.free == len(pool.unused) == 3 and a not in pool


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
        PageIndex, "lost", lambda index, digests, ranks: (passes.append((digests, ranks)), lost(index, digests, ranks))
    )
    first, second, third = (Request(number, [0], SamplingParams()) for number in range(3))
    ledger.begin(first, range(4), [], 2)
    ledger.name(first, [b"a", b"b"], 0)
    ledger.release(first)
    ledger.take(second, 3, 2)  # evicts the last page there
    assert ledger.index.ranks == {b"a": 0b1111, b"b": 0b0111} and not forgotten
    passes.clear()
    ledger.release(second)
    ledger.begin(third, range(4), [], 3)
    assert not ledger.index.ranks and forgotten == [b"b", b"a"]
    assert [one for one in passes if one[0]] == [([b"b", b"a"], 0b0111), ([b"a"], 0b1000)]
