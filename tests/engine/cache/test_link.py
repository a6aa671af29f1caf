"""Pages from one part of a run to the other: what arrives, in which order, what is counted, and what waits for what."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from caches import KINDS, LAYERS, cache_config
from dsa_engine.engine.cache import link
from dsa_engine.engine.cache.link import PageReceiver, PageSender, RankPages
from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.kv_cache import KVCache, cache_format
from dsa_engine.parallel.disaggregation import PageGroups
from dsa_engine.parallel.group import Group
from fake_cuda import FakeDevice
from fake_cuda.world import FakeGroup
from gloo_ranks import on_linked_ranks

PAGES, PAGE_SIZE = 12, 2
MAIN = len(KINDS)
NO_GPU = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a fake device")


def make(dtype: torch.dtype = torch.float32, rank: int = 0, device: str = "cpu") -> KVCache:
    """Caches whose pages differ in all ranks, layers and words."""
    config = cache_config()
    cache = KVCache(config, cache_format(config, dtype), PAGES, PAGE_SIZE, torch.device(device))
    for number, pool in enumerate(flat(cache)):
        pool.copy_(torch.arange(pool.numel()).view_as(pool) * 64 + 32 * rank + number)
    return cache


def device_words(cache: KVCache) -> list[list[torch.Tensor]]:
    return [[pool.on_device for pool in layer] for layer in cache.page_map.layers]


def flat(cache: KVCache) -> list[torch.Tensor]:
    return [pool for layer in device_words(cache) for pool in layer]


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(1e-4)


def run_step(sender: PageSender, sends: list[RankPages]) -> None:
    sender.begin(sends)
    for layer in range(LAYERS):
        sender.arrive(layer)
    sender.finish()


def drained(poll: Callable[[], list[RankPages]], count: int) -> list[RankPages]:
    ended: list[RankPages] = []
    wait_for(lambda: bool(ended.extend(poll())) or len(ended) >= count)
    return ended


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize(("senders", "receivers"), [([0], [1]), ([0, 1], [2]), ([0], [1, 2]), ([0, 1], [2, 3])])
def test_transfers_in_any_order(
    senders: list[int], receivers: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many transfers over all pairs, several in a step, in messages of two pages; each rank takes
    part at its own pace, and goes through its pairs in an order of its own."""
    monkeypatch.setattr(link, "_MESSAGE_BYTES", 2 * PAGE_SIZE * 1000)
    plan = random.Random(0)
    steps = []  # for each pair its steps, each a list of (pages there, pages here)
    for _ in range(6):
        step = {}
        for receiver in receivers:
            free = plan.sample(range(PAGES), PAGES)
            for sender in senders:
                moves = [[free.pop() for _ in range(plan.randint(0, 3))] for _ in range(plan.randint(0, 2))]
                step[sender, receiver] = [(plan.sample(range(PAGES), len(into)), into) for into in moves]
        steps.append(step)

    def work(rank: int, groups: PageGroups) -> Any:
        cache, pace = make(dtype, rank), random.Random(rank)
        others = list(receivers if rank in senders else senders)
        sender, receiver = PageSender(cache, groups, MAIN), PageReceiver(cache, groups)
        states, bytes_moved = [], 0
        for step in steps:
            pace.shuffle(others)
            time.sleep(pace.random() / 500)
            if rank in senders:
                moves = [RankPages(i, r, page) for r in others for i, (page, _) in enumerate(step[rank, r])]
                run_step(sender, moves)
                assert sorted(drained(sender.poll, len(moves))) == sorted(moves)
            else:
                moves = [RankPages(i, r, page) for r in others for i, (_, page) in enumerate(step[r, rank])]
                receiver.post(moves)
                assert sorted(drained(receiver.poll, len(moves))) == sorted(moves)
                states.append([pool.clone() for pool in flat(cache)])
            bytes_moved += sum(len(move.pages) for move in moves) * cache.page_bytes
        assert groups.device.bytes_sent == sender.bytes_moved
        assert sender.bytes_moved == bytes_moved * (rank in senders)
        assert receiver.bytes_moved == bytes_moved * (rank in receivers)
        sender.close()
        receiver.close()
        return states

    results = dict(zip(sorted([*senders, *receivers]), on_linked_ranks(senders, receivers, work), strict=True))
    for rank in receivers:
        expected = flat(make(dtype, rank))
        for step, state in zip(steps, results[rank], strict=True):
            for sender in senders:
                for source, into in step[sender, rank]:
                    for pool, theirs in zip(expected, flat(make(dtype, sender)), strict=True):
                        pool[into] = theirs[source]
            assert all(torch.equal(pool, filled) for pool, filled in zip(expected, state, strict=True))


def test_a_late_receiver_delays_nothing() -> None:
    """The sender runs its steps and sends to another rank; pages that a layer writes arrive as it has written them."""
    posting, checked = threading.Event(), threading.Event()

    def work(rank: int, groups: PageGroups) -> None:
        cache = make(rank=rank)
        if rank == 0:
            sender = PageSender(cache, groups, MAIN)
            for number in range(3):
                sender.begin([RankPages(number, 1, [number, 5]), RankPages(number, 2, [number])])
                for layer in range(MAIN):
                    for pool in device_words(cache)[layer]:
                        pool[number] = -1 - number  # the rows of this step
                    sender.arrive(layer)
                for module in range(2):
                    for _ in range(2):  # a module runs several times: its last rows are the ones that count
                        for pool in device_words(cache)[MAIN + module]:
                            pool[number] -= 1
                        sender.arrive(MAIN + module)
                sender.finish()
            assert {move.rank for move in drained(sender.poll, 3)} == {2}
            checked.set()
            posting.wait()
            assert [move.rank for move in drained(sender.poll, 3)] == [1, 1, 1]
            assert sender.bytes_moved == 9 * cache.page_bytes
            return
        if rank == 1:
            assert checked.wait(60)
        receiver = PageReceiver(cache, groups)
        for number in range(3):
            receiver.post([RankPages(number, 0, [number + 6, 1] if rank == 1 else [number + 6])])
        posting.set() if rank == 1 else None
        drained(receiver.poll, 3)
        sent, before = make(rank=0), 0
        for layer, pools in enumerate(device_words(cache)):
            for pool in pools:
                theirs = flat(sent)[before]
                before += 1
                for number in range(3):
                    rows = theirs[number] - 2 if layer >= MAIN else torch.full_like(theirs[0], -1 - number)
                    assert torch.equal(pool[number + 6], rows)
                if rank == 1:
                    assert torch.equal(pool[1], theirs[5])

    on_linked_ranks([0], [1, 2], work)


def test_layers_that_are_stored_go_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit; no layer waits for the next one, nor for another prompt."""
    arrived, prefilled, words, pages = threading.Semaphore(0), threading.Event(), list[int](), [1, 2]
    monkeypatch.setattr(link, "_MESSAGE_BYTES", 4 * PAGE_SIZE * 1000)  # three layers

    def work(rank: int, groups: PageGroups) -> None:
        cache = make(rank=rank)
        if rank == 1:
            receiver, sent = PageReceiver(cache, groups), make(rank=0)
            receiver.post([RankPages(0, 0, pages)])
            for ours, theirs in zip(device_words(cache), device_words(sent), strict=True):
                wait_for(lambda one=(ours, theirs): all(torch.equal(a[pages], b[pages]) for a, b in zip(*one)))  # type: ignore[misc]
                arrived.release()
            drained(receiver.poll, 1)
            assert prefilled.wait(60)
            for number in (1, 2):
                receiver.post([RankPages(number, 0, pages)])
            drained(receiver.poll, 2)
            return
        send = groups.host.send

        def count(word: torch.Tensor, to: int) -> None:
            words.append(int(word))
            send(word, to)

        groups.host.send = count  # type: ignore[method-assign]
        sender = PageSender(cache, groups, MAIN)
        sender.begin([RankPages(0, 1, pages)])
        for layer in range(MAIN):
            sender.arrive(layer)
            assert arrived.acquire(timeout=30), f"layer {layer} waits for the next one"
        sender.finish()
        drained(sender.poll, 1)
        words.append(0)
        for number in (1, 2):
            run_step(sender, [RankPages(number, 1, pages)])
        prefilled.set()
        drained(sender.poll, 2)

    on_linked_ranks([0], [1], work)
    assert words[:MAIN] == [1] * MAIN
    hurried = words[words.index(0) + 1 :]
    assert sum(hurried) == 2 * LAYERS and len(hurried) <= 5, "of 10: the first may be told alone"
    assert hurried[-2:] == [3, 2], "a message of each prompt's own"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_that_have_the_same_pages_send_each_once(size: int) -> None:
    """Page numbers differ on each rank; the receiver's pages are filled in the order of the request's tokens."""
    into, senders = [9, 2, 11, 4, 7], list(range(size))
    have = [[(3 * rank + 2 * page) % PAGES for page in range(len(into))] for rank in senders]

    def work(rank: int, groups: PageGroups) -> int:
        cache = make()
        if rank < size:
            for page, number in enumerate(have[rank]):
                for pool in flat(cache):
                    pool[number] = 1000 + page
            sender = PageSender(cache, groups, MAIN)
            run_step(sender, [RankPages(0, size, have[rank][rank::size])])
            drained(sender.poll, 1)
            return sender.bytes_moved
        receiver = PageReceiver(cache, groups)
        receiver.post([RankPages(0, source, into[source::size]) for source in senders])
        drained(receiver.poll, size)
        for page, number in enumerate(into):
            assert all(bool((pool[number] == 1000 + page).all()) for pool in flat(cache))
        return 0

    assert sum(on_linked_ranks(senders, [size], work)) == len(into) * make().page_bytes


def test_a_link_that_fails_says_so() -> None:
    class Broken(Group):
        def _send(self, rows: torch.Tensor, to: int) -> None:
            raise RuntimeError("connection closed by peer")

        _recv = _send

    cache, broken = make(), Broken((0, 1), 0, None)
    sender, receiver = (
        PageSender(cache, PageGroups(broken, broken), MAIN),
        PageReceiver(cache, PageGroups(broken, broken)),
    )
    run_step(sender, [RankPages(0, 1, [1])])
    receiver.post([RankPages(0, 1, [1])])
    for poll in (sender.poll, receiver.poll):
        with pytest.raises(RuntimeError, match="closed by peer"):
            drained(poll, 1)


@NO_GPU
@pytest.mark.parametrize("sends", [True, False])
def test_on_cuda_links_share_a_stream_and_allocate_nothing(threads_by_hand: None, sends: bool) -> None:
    with FakeDevice() as device:
        cache = make(torch.bfloat16, device="cuda:0")
        groups = PageGroups(*(FakeGroup((0, 1, 2), 0, None, device=device) for _ in range(2)))
        before = device.live
        sender, receiver = PageSender(cache, groups, MAIN), PageReceiver(cache, groups)
        live = device.live
        counted = 2 * PageSender.device_bytes(cache_config(), cache.format, PAGE_SIZE)
        assert counted <= live - before <= counted + 2 * 2 * 511, "each of 2 buffers is rounded up"
        moves, end = [RankPages(0, 1, [1, 2]), RankPages(1, 2, [3])], sender if sends else receiver
        with device.watched():
            for _ in range(2):
                run_step(sender, moves) if sends else receiver.post(moves)
                assert not device.launches and end.poll() == []
            end.close()
            assert end.poll() == 2 * moves
        assert device.peak == device.live == live
        (own,) = device.streams_used - {0}
        assert device.reached[0][own] == 0, "no step waits for it"
        # Here all layers of a step are stored before its first message; the fake sender says that it has one each time.
        prompts, messages = 2 * 2, 1 if sends else LAYERS
        assert device.count("collective", "exchange") == prompts * messages
        waits = ["event in link.py:_work_off"] + ["event in link.py:_carry"] * messages
        assert device.waits == waits * prompts, "of the host: for the rows of a layer, and until a message has come"
