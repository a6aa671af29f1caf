"""Pages that spill, in place of requests that are preempted: which, when, and the room that this makes.

Of a page that spills only the latent rows leave the device, for host memory, and a decode step brings those that it
selects into the *hot rows* of their request. So only pages spill whose rows are complete and stay as they are, and that
one request holds, of the requests that come first in order and from their first pages on. All other pages of a request,
its *tail*, are resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.cache.pool import Ints
from dsa_engine.engine.requests.request import Request

BATCH = 16  # pages that spill together when requests grow


class Spilling:
    """``front``: the number of a request's first pages whose rows are complete, and will not be written again, when the
    steps in flight are done. ``spilled``: number of pages that have spilled so far, of all pools."""

    def __init__(self, ledger: PageLedger, front: Callable[[Request], int]):
        self._ledger, self._front = ledger, front
        self.spilled = 0

    @property
    def held(self) -> int:
        """Number of spilled pages that requests hold, of all pools."""
        ledger = self._ledger
        return sum(ledger.spilled * ledger.dcp_size - pool.free_spilled for pool in ledger.pools)

    def owners(self, ranks: Iterable[int]) -> list[int]:
        """Those of ``ranks`` whose pool has a set of hot rows left."""
        return [rank for rank in ranks if self._ledger.free_sets[self._ledger.pool_of(rank)]]

    def spill(self, pool: int, count: int) -> int:
        """Spills ``count`` pages of a pool, or those that can; returns how many."""
        rest = count
        for request, first in self._holders(pool):
            if not rest or not self._ledger.pools[pool].free_spilled:
                break
            rest -= self._ledger.spill(request, pool, first, rest)
        self.spilled += count - rest
        return count - rest

    def fits(self, pools: Sequence[int], numbers: Ints, pages: int, front: int, reserved: Ints) -> bool:
        """Whether a request of ``pages`` pages, which begins with those of these digests, and whose pages after those
        and after the first ``front`` ones are resident, finds room in all of ``pools`` and a set of hot rows in one.
        It leaves the ``reserved`` pages of each pool, which others may take in their next steps; pages may spill."""
        return any(self._ledger.free_sets[pool] for pool in pools) and all(
            self._fits(pool, numbers, pages, pages - max(front, len(numbers)), int(reserved[pool])) for pool in pools
        )

    def _fits(self, pool: int, numbers: Ints, pages: int, tail: int, reserved: int) -> bool:
        its = self._ledger.pools[pool]
        room = its.room_beside(numbers)
        resident = int(room.resident.sum())
        if room.absent + pages - len(numbers) + reserved > resident + int(room.spilled.sum()):
            return False
        lacks, size = tail + reserved - resident, len(room.resident)
        can = np.bincount(room.unheld % size, minlength=size)  # pages of each rank that can spill
        holders = self._holders(pool)
        while (have := int(np.minimum(can, room.spilled).sum())) < lacks and (one := next(holders, None)) is not None:
            held = self._ledger.first_pages(one[0], pool, one[1])
            some = held[its.spillable(held)]
            can += np.bincount(some[~np.isin(some, room.hits)] % size, minlength=size)
        return have >= lacks

    def room_for(self, pages: int, front: int) -> Callable[[int, Ints], Ints]:
        """Makes resident room for the pages from ``front`` on of a request that fits, see ``PagePool.begin``: pages of
        others spill, then those that it has found."""

        def make_room(pool: int, hits: Ints) -> Ints:
            its = self._ledger.pools[pool]
            if (lacks := pages - front - its.free) > 0 and (lacks := lacks - self.spill(pool, lacks)) > 0:
                before, hits = hits, its.spill(hits, lacks)
                self.spilled += int((hits != before).sum())
            assert its.free >= pages - front, "what a decode step writes must be resident"
            return hits

        return make_room

    def _holders(self, pool: int) -> Iterator[tuple[Request, int]]:
        """The requests that hold pages, in order, and the number of first pages of each that might spill."""
        for request in sorted(self._ledger.holders(pool), key=attrgetter("order")):
            if not self._ledger.fetching(request):  # rows that are still on their way
                yield request, self._front(request)
