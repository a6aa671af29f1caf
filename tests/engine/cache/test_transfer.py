"""Pages between device and host memory, and between ranks: what arrives, what is counted, and what waits for what."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from caches import LAYERS, cache_config
from dsa_engine.engine.cache import transfer as host_module
from dsa_engine.engine.cache.pool import PageCopy, PageMoves
from dsa_engine.engine.cache.sizes import TierSizes
from dsa_engine.engine.cache.transfer import HostCopies, HostPages, PageTransfer, independent_runs, neighbours
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.kv_cache import KVCache, cache_format, pool_page_bytes
from dsa_engine.model.pages.page_map import PageMap
from dsa_engine.parallel.group import Group
from fake_cuda import FakeDevice
from fake_cuda.world import FakeGroup
from gloo_ranks import on_ranks, watch_transfers

PAGES, SLOTS, PAGE_SIZE = 6, 4, 2
ALONE = Group((0,), 0, None)
FORMATS = pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["float32", "fp8"])
NO_GPU = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a fake device")


def make(dtype: torch.dtype, pages: int = PAGES, device: str = "cpu") -> KVCache:
    config = cache_config()
    return KVCache(config, cache_format(config, dtype), pages, PAGE_SIZE, torch.device(device))


def mark(pools: list[list[torch.Tensor]], start: int) -> None:
    """Numbers that differ in all pools and pages."""
    for layer, of_layer in enumerate(pools):
        for kind, pool in enumerate(of_layer):
            pool.copy_(torch.arange(len(pool))[:, None] + start + 100 * layer + 50 * kind)


def contents(pools: list[list[torch.Tensor]]) -> list[list[list[int]]]:
    """The first word of each page, and that all its words are equal."""
    assert all(torch.equal(pool, pool[:, :1].expand_as(pool)) for layer in pools for pool in layer)
    return [[pool[:, 0].tolist() for pool in layer] for layer in pools]


def words(cache: KVCache) -> list[list[torch.Tensor]]:
    return [[pool.on_device for pool in layer] for layer in cache.page_map.layers]


COPIES = st.lists(st.builds(PageCopy, st.booleans(), st.integers(0, PAGES - 1), st.integers(0, SLOTS - 1)), max_size=24)


@FORMATS
@settings(max_examples=40)
@given(st.lists(COPIES, max_size=3), st.integers(1, 3), st.integers(1, 8))
def test_copies_have_the_effect_of_one_after_another(
    dtype: torch.dtype, steps: list[list[PageCopy]], at_once: int, indices: int
) -> None:
    """Through a buffer of a few pages."""
    cache = make(dtype)
    pools, host = words(cache), HostPages(cache, SLOTS)
    with pytest.MonkeyPatch.context() as patch:
        largest = max(pool[0].nbytes for layer in pools for pool in layer)
        patch.setattr(host_module, "_STAGING_BYTES", at_once * largest)
        patch.setattr(host_module, "_INDICES", indices)
        copies = HostCopies(cache.page_map, host)
        mark(pools, 1000)
        mark(host.pools, 2000)
        on_device, in_host = contents(pools), contents(host.pools)
        for step in steps:
            copies.start(step)
            copies.wait()
            for to_host, page, slot in step:
                for layer, theirs in zip(on_device, in_host, strict=True):
                    for pool, slots in zip(layer, theirs, strict=True):
                        if to_host:
                            slots[slot] = pool[page]
                        else:
                            pool[page] = slots[slot]
            assert contents(pools) == on_device and contents(host.pools) == in_host
    to_host = sum(copy.to_host for step in steps for copy in step)
    assert copies.bytes_to_host == to_host * host.page_bytes
    assert copies.bytes_from_host == (sum(map(len, steps)) - to_host) * host.page_bytes


SPILLED = 5
MIXED = st.lists(
    st.one_of(
        st.builds(PageCopy, st.booleans(), st.integers(0, PAGES + SPILLED - 1), st.integers(0, SLOTS - 1)),
        st.builds(PageCopy, st.just(True), st.integers(0, PAGES - 1), st.integers(-PAGES - SPILLED, -1 - PAGES)),
    ),
    max_size=24,
)  # fmt: skip


class Hot:
    """Hot rows, of which every page of this rank has some at first."""

    def __init__(self) -> None:
        self.known = {*range(PAGES, PAGES + SPILLED)}

    def forget(self, pages: list[int]) -> None:
        assert min(pages) >= PAGES
        self.known -= {*pages}


def make_spilled(dtype: torch.dtype, device: str = "cpu") -> tuple[KVCache, PageMap, Hot]:
    """Caches with spilled pages, and with room for hot rows, which no copy of pages touches."""
    config, hot = cache_config(), Hot()
    cache = KVCache(config, cache_format(config, dtype), PAGES, PAGE_SIZE, torch.device(device), None, SPILLED, 1, 3)
    assert cache.hot_pages == 2
    return cache, PageMap(cache.latent, cache.index_keys, cache.host_latent, PAGES, hot), hot


def mark_all(page_map: PageMap, start: int) -> list[list[list[int]]]:
    """Numbers that differ in all pools and pages; returns them."""
    marks = []
    for layer, pools in enumerate(page_map.layers):
        of_layer = []
        for kind, pool in enumerate(pools):
            numbers = [start + 100 * layer + 50 * kind + page for page in range(PAGES + SPILLED)]
            rows = torch.tensor(numbers, dtype=pool.on_device.dtype)[:, None].expand(-1, pool.width).contiguous()
            pool.write(page_map.moved([*range(PAGES + SPILLED)], torch.arange(PAGES + SPILLED)), rows)
            of_layer.append(numbers)
        marks.append(of_layer)
    return marks


def all_contents(page_map: PageMap) -> list[list[list[int]]]:
    """Those of :func:`contents`, by the pools' tensors and not by what moves pages."""
    return contents([
        [
            pool.on_device[:PAGES + SPILLED] if pool.in_host is None else torch.cat((pool.on_device, pool.in_host))
            for pool in pools
        ]
        for pools in page_map.layers
    ])  # fmt: skip


@FORMATS
@settings(max_examples=40)
@given(st.lists(MIXED, max_size=3), st.integers(1, 3), st.integers(2, 8))
def test_copies_and_spills_have_the_effect_of_one_after_another(
    dtype: torch.dtype, steps: list[list[PageCopy]], at_once: int, indices: int
) -> None:
    """Of pages that lie on the device and of others; hot rows of what is written are forgotten, and no others."""
    cache, page_map, hot = make_spilled(dtype)
    host, hot_rows = HostPages(cache, SLOTS), [pool[PAGES:] for pool in cache.latent]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "_STAGING_BYTES", at_once * max(p.page_bytes for of in page_map.layers for p in of))
        patch.setattr(host_module, "_INDICES", indices)
        copies = HostCopies(page_map, host)
        pages = mark_all(page_map, 1000)
        mark(host.pools, 2000)
        in_host, known, spilled = contents(host.pools), {*hot.known}, 0
        for step in steps:
            copies.start(step)
            copies.wait()
            for to_host, page, slot in step:
                for layer, theirs in zip(pages, in_host, strict=True):
                    for pool, slots in zip(layer, theirs, strict=True):
                        if slot < 0:
                            pool[-1 - slot] = pool[page]
                        elif to_host:
                            slots[slot] = pool[page]
                        else:
                            pool[page] = slots[slot]
                known -= {-1 - slot} if slot < 0 else set() if to_host else {page}
                spilled += slot < 0
            assert all_contents(page_map) == pages and contents(host.pools) == in_host
            assert hot.known == known
    assert not any(pool.view(torch.uint8).any() for pool in hot_rows)
    moved = [one for step in steps for one in step]
    latent = LAYERS * PAGE_SIZE * cache.format.latent.row_bytes
    others = sum(one.to_host and one.slot >= 0 for one in moved)
    assert copies.bytes_to_host == others * cache.page_bytes + spilled * latent
    assert copies.bytes_from_host == sum(not one.to_host for one in moved) * cache.page_bytes


@FORMATS
def test_spilled_pages_are_exchanged(dtype: torch.dtype) -> None:
    """To and from pages of both kinds, in any order."""
    sends, fills = [3, 10, 0, 6, 7, 1], [9, 2, 8, 7, 4, 0]

    def work(group: Group) -> Any:
        cache, _, hot = make_spilled(dtype)
        cache.page_map = PageMap(cache.latent, cache.index_keys, cache.host_latent, PAGES, hot)
        transfer, before = PageTransfer(cache, group, None, 6), mark_all(cache.page_map, 1000 * group.index)
        mine = [[], sends] if group.index == 0 else [[], []]
        theirs = [[], []] if group.index == 0 else [fills, []]
        transfer.begin(PageMoves([], mine, theirs, True))
        transfer.finish()
        return before, all_contents(cache.page_map), hot.known

    (sent, unchanged, known), (expected, filled, forgotten) = on_ranks(2, work)
    for layer, of_layer in zip(sent, expected, strict=True):
        for pool, into in zip(layer, of_layer, strict=True):
            for page, to in zip(sends, fills, strict=True):
                into[to] = pool[page]
    assert unchanged == sent and filled == expected
    assert known - forgotten == {page for page in fills if page >= PAGES}


def test_pages_that_take_turns_in_slots_are_two_runs() -> None:
    copies = [PageCopy(to_host, page, page if to_host else 9 - page) for page in range(4) for to_host in (True, False)]
    runs = independent_runs(copies)
    assert [(run.to_host, len(run.pairs)) for run in runs] == [(True, 4), (False, 4)]
    assert neighbours(runs[0].pairs) == [(0, 0, 4)], "neighbours are one transfer"


@FORMATS
def test_parts_are_the_bytes_of_a_slot(dtype: torch.dtype) -> None:
    cache = make(dtype)
    host = HostPages(cache, SLOTS)
    transfer = PageTransfer(cache, ALONE, host, 0)
    mark(words(cache), 1000)
    transfer.begin(PageMoves([PageCopy(True, 3, 2)]))
    transfer.copied()
    pools = [pool for pair in zip(cache.latent, cache.index_keys, strict=True) for pool in pair if pool is not None]
    assert len(pools) == 2 * LAYERS - 1 and host.bytes == SLOTS * host.page_bytes == SLOTS * cache.bytes // PAGES
    parts = host.parts(2)
    assert [bytes(part) for part in parts] == [pool[3].view(torch.uint8).numpy().tobytes() for pool in pools]
    assert [len(part) for part in parts] == sum(pool_page_bytes(cache_config(), cache.format, PAGE_SIZE), [])
    for other, part in zip(host.parts(0), parts, strict=True):
        other[:] = part
    transfer.begin(PageMoves([PageCopy(False, 5, 0)]))
    transfer.copied()
    assert all(torch.equal(pool[5].view(torch.uint8), pool[3].view(torch.uint8)) for pool in pools)


# Pages that each rank sends to each rank, and where they go: a page may go to several ranks and to one of them twice.
SENDS = {
    2: [[[], [1, 4, 1]], [[], []]],
    3: [[[], [0, 2], [2]], [[], [], []], [[5, 3, 5], [4], []]],
}
FILLS = {
    2: [[[], []], [[2, 0, 3], []]],
    3: [[[], [], [0, 1, 4]], [[2, 0], [], [5]], [[3], [], []]],
}


def exchanged(states: list[Any], size: int) -> list[Any]:
    """The pools of all ranks after a step that brings page 2 from host memory, and then exchanges pages."""
    for rank, layers in enumerate(states):
        for layer, pools in enumerate(layers):
            for kind, pool in enumerate(pools):
                pool[2] = 1000 * rank + 501 + 100 * layer + 50 * kind
    after = copy.deepcopy(states)
    for source, sends in enumerate(SENDS[size]):
        for rank, pages in enumerate(sends):
            for page, into in zip(pages, FILLS[size][rank][source], strict=True):
                for theirs, ours in zip(states[source], after[rank], strict=True):
                    for pool, filled in zip(theirs, ours, strict=True):
                        filled[into] = pool[page]
    return after


@FORMATS
@pytest.mark.parametrize("size", [2, 3])
def test_exchange(dtype: torch.dtype, size: int) -> None:
    """Two steps with real collectives, in which each layer's pages are there when the layer asks for them."""

    def work(group: Group) -> tuple[Any, ...]:
        cache, rank = make(dtype), group.index
        pools, host = words(cache), HostPages(cache, SLOTS)
        transfer = PageTransfer(cache, group, host, 4)
        mark(pools, 1000 * rank)
        mark(host.pools, 1000 * rank + 500)
        states = [contents(pools)]
        for _ in range(2):
            transfer.begin(PageMoves([PageCopy(False, 2, 1)], SENDS[size][rank], FILLS[size][rank], True))
            arrived: list[Any] = []
            for layer in range(LAYERS - 1):
                transfer.arrive(layer)
                arrived += contents(pools[layer : layer + 1])
            transfer.finish()
            states.append(contents(pools))
            assert states[-1][:-1] == arrived
        return states, group, host.page_bytes

    results = on_ranks(size, work)
    expected = [states[0] for states, *_ in results]
    for step in (1, 2):
        expected = exchanged(expected, size)
        assert [states[step] for states, *_ in results] == copy.deepcopy(expected)
    for rank, (_, group, page_bytes) in enumerate(results):
        assert group.bytes_sent == 2 * page_bytes * sum(map(len, SENDS[size][rank]))
        collectives = group.log
        assert len(collectives) == 2 * LAYERS and {(c.kind, c.asynchronous) for c in collectives} == {
            ("all_to_all", True)
        }
        layers = [sum(sizes) for sizes in pool_page_bytes(cache_config(), make(dtype, 1).format, PAGE_SIZE)]
        for number, collective in enumerate(collectives):
            page = layers[number % LAYERS]
            assert collective.sent == tuple(page * len(pages) for pages in SENDS[size][rank])
            assert collective.received == tuple(page * len(pages) for pages in FILLS[size][rank])


def test_a_layers_exchange_is_under_the_layer_before() -> None:
    """Begun before that layer computes, and waited for after it."""

    def work(group: Group) -> list[str]:
        seen: list[str] = []
        watch_transfers(group, lambda what, _, number: seen.append(f"{what} {number}"))
        cache = make(torch.float32)
        transfer = PageTransfer(cache, group, None, 4)
        pages = [[], [0]] if group.index == 0 else [[1], []]  # one page each way
        transfer.begin(PageMoves([], pages, pages, True))
        for layer in range(LAYERS):
            transfer.arrive(layer)
            seen.append(f"compute {layer}")
        return seen

    order = ["begin 0"]
    for layer in range(LAYERS):
        order += [f"begin {layer + 1}"] * (layer + 1 < LAYERS) + [f"wait {layer}", f"compute {layer}"]
    assert on_ranks(2, work) == [order, order]


def test_all_layers_arrive_where_only_the_last_asks() -> None:
    """And a module that runs again asks again."""

    def work(group: Group) -> list[Any]:
        cache = make(torch.float32)
        mark(words(cache), 1000 * group.index)
        transfer = PageTransfer(cache, group, None, 1)
        pages = [[], [3]] if group.index == 0 else [[], []]
        fills = [[], []] if group.index == 0 else [[4], []]
        transfer.begin(PageMoves([], pages, fills, True))
        for _ in range(2):
            transfer.arrive(LAYERS - 1)
        return [layer[0][4] for layer in contents(words(cache))]

    assert on_ranks(2, work)[1] == [100 * layer + 3 for layer in range(LAYERS)]


@NO_GPU
class TestOnCuda:
    """Streams, memory and waits on a fake device, whose default stream computes."""

    @staticmethod
    def transfer(device: FakeDevice, cache: KVCache | None = None, size: int = 1) -> PageTransfer:
        cache = cache or make(torch.bfloat16, device="cuda:0")
        cache.latent[0].zero_()  # earlier work
        group = FakeGroup(tuple(range(size)), 0, None, device=device)
        return PageTransfer(cache, group, HostPages(cache, SLOTS), 4)

    def test_a_layer_waits_for_its_own_copies(self) -> None:
        with FakeDevice() as device:
            transfer = self.transfer(device)
            before = device.reached[0][0]
            with device.watched():
                transfer.begin(PageMoves([PageCopy(True, 0, 0), PageCopy(False, 0, 1), PageCopy(False, 3, 2)]))
                (stream,) = device.streams_used - {0}
                assert device.reached[stream][0] == before, "copies wait for the work before them"
                reached = []
                for layer in range(LAYERS):
                    transfer.arrive(layer)
                    reached.append(device.reached[0][stream])
                # The page numbers once; then a gather, a copy to the device and a scatter for each pool.
                pools = [1 if layer == 1 else 2 for layer in range(LAYERS)]
                assert reached == [1 + 3 * sum(pools[: layer + 1]) for layer in range(LAYERS)]
                assert device.waits == []
                transfer.copied()
                assert len(device.waits) == 1

    def test_a_spill(self) -> None:
        """A copy of all page numbers; of each pool of latent rows a gather and a copy to the host, of index keys a
        gather and a scatter, and nothing that the host waits for. Each layer waits for its own; memory is pinned."""
        with FakeDevice() as device:
            cache, page_map, _ = make_spilled(torch.bfloat16, "cuda:0")
            assert sum(device.pinned_ranges.values()) == sum(pool.nbytes for pool in cache.host_latent)
            copies = HostCopies(page_map, HostPages(cache, SLOTS))
            with device.watched():
                copies.start([PageCopy(True, 4, -1 - 7), PageCopy(True, 2, -1 - 8), PageCopy(True, 0, -1 - 10)])
                (stream,) = device.streams_used - {0}
                reached = []
                for layer in range(LAYERS):
                    copies.join(layer)
                    reached.append(device.reached[0][stream])
            # The fake device counts no copy to the host.
            pools = [1 if layer == 1 else 3 for layer in range(LAYERS)]
            assert reached == [1 + sum(pools[: layer + 1]) for layer in range(LAYERS)]
            assert device.waits == [] and device.peak == device.live
            del copies, page_map, cache
            assert not device.pinned_ranges

    def test_the_next_step_waits_for_pages_that_are_copied_out(self) -> None:
        with FakeDevice() as device:
            transfer = self.transfer(device)
            transfer.begin(PageMoves([PageCopy(True, 0, 0), PageCopy(True, 4, 1)]))
            done = transfer.copied
            (stream,) = device.streams_used - {0}
            assert device.reached[stream][0] == device.reached[0][0], "it begins after the step"
            assert device.reached[0][stream] == 0, "and nothing waits for it yet"
            transfer.begin(PageMoves())
            transfer.arrive(0)
            assert 0 < device.reached[0][stream] < device.reached[stream][stream]
            transfer.finish()
            assert device.reached[0][stream] == device.reached[stream][stream]
            assert device.waits == []
            done()

    def test_an_exchange_follows_the_layers_copies_only(self) -> None:
        with FakeDevice() as device:
            transfer = self.transfer(device, size=2)
            transfer.begin(PageMoves([PageCopy(False, 0, 1)], [[], [0, 2]], [[], [1]], True))
            copying, sending, _ = sorted(device.streams_used - {0})  # the last is the group's
            alone = device.reached[sending][copying]
            assert 0 < alone < device.reached[copying][copying]
            for layer in range(LAYERS):
                transfer.arrive(layer)
                assert device.reached[0][sending] > 0
                sent = device.count("collective", "all_to_all")
                assert sent == min(layer + 2, LAYERS)
            assert device.reached[0] >= device.reached[sending]
            assert device.waits == []

    def test_a_step_allocates_nothing_on_the_device(self) -> None:
        moves = PageMoves(
            [PageCopy(i % 2 == 0, i % PAGES, i % SLOTS) for i in range(6)], [[], [0, 2]], [[], [1, 3]], True
        )
        with FakeDevice() as device:
            mesh: Any = SimpleNamespace(device=torch.device("cuda", 0))
            cache = make(torch.bfloat16, device="cuda:0")
            before = device.live
            transfer = self.transfer(device, cache, size=2)
            live = device.live
            counted = TierSizes(SLOTS, 0, 4).device_bytes(mesh, cache_config(), cache.format, PAGE_SIZE)
            assert counted <= live - before <= counted + 5 * 511, "each of 5 buffers is rounded up"
            with device.watched():
                for _ in range(2):
                    transfer.begin(moves)
                    transfer.finish()
                    transfer.begin(PageMoves([PageCopy(True, 1, 1)]))
            assert device.peak == device.live == live

    def test_host_memory_that_cannot_be_pinned(self) -> None:
        with FakeDevice() as device:
            device.pinnable = 1000
            with pytest.raises(CapacityError, match=r"could not be pinned \(CUDA error 2\); lower host_cache_memory"):
                self.transfer(device)
            device.pinnable = 1 << 30
            transfer = self.transfer(device)
            assert len(device.pinned_ranges) == 1
            del transfer
            assert not device.pinned_ranges, "unpinned with the slots"
