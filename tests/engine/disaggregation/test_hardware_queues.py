"""Pages under a prefill, on devices whose streams share hardware queues: nothing hangs, and no device holds
multiprocessors for a rank that is late."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.cache.link import PageReceiver, PageSender, RankPages
from dsa_engine.model.kv_cache import KVCache, cache_format
from dsa_engine.parallel.disaggregation import PageGroups
from hardware_queues import Device, DeviceGroup, HostGroup, Meeting, Queues

LAYERS = 3
SIZES = {"num_hidden_layers": LAYERS, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "index_head_dim": 4}
CONFIG = ModelConfig.from_dict(released_config("deepseek_v32") | SIZES)
PARTS = [(1, 1), (2, 6), (4, 4), (6, 2), (8, 8), (16, 16), (24, 40), (32, 32)]


def run_layers(devices: Sequence[Device], arrive: Callable[[Device, int], object]) -> None:
    """A step of ranks that prefill: a layer stores its rows on a side stream, and ends with a collective."""
    for device in devices:
        communicator, beside = device.Stream(), device.Stream()
        for layer in range(LAYERS):
            device.follow(beside, Meeting((device.rank, layer), 1))
            arrive(device, layer)
            device.follow(communicator, Meeting(layer, len(devices)))


def run_linked(queues: Queues, devices: Sequence[Device], senders: int, targets: Sequence[int]) -> None:
    """Each rank that prefills sends pages to some that decode, as the engine does."""
    words: Any = defaultdict(SimpleQueue)
    transfers: list[Any] = []
    for device in devices:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "get_device_module", lambda _, device=device: device)
            cache = KVCache(CONFIG, cache_format(CONFIG, torch.float32), 4, 2, torch.device("cpu"))
            groups: Any = PageGroups(HostGroup(device.rank, words), DeviceGroup(device))
            end = PageReceiver(cache, groups)
            transfers.append(PageSender(cache, groups, LAYERS) if device.rank < senders else end)
    for end in transfers[:senders]:
        end.begin([RankPages(0, target, [1, 2]) for target in targets])
    run_layers(devices[:senders], lambda device, layer: transfers[device.rank].arrive(layer))
    for end in transfers[:senders]:
        end.finish()
    for target in reversed(targets):  # each of them late
        transfers[target].post([RankPages(0, sender, [0, 3]) for sender in range(senders)])
    for end, count in [(end, len(targets)) for end in transfers[:senders]] + [
        (transfers[target], senders) for target in targets
    ]:
        limit = time.monotonic() + 60
        while count:
            assert time.monotonic() < limit
            count -= len(end.poll())
            time.sleep(1e-4)
        end.close()


def run_crossed(queues: Queues, devices: Sequence[Device], senders: int, targets: Sequence[int]) -> None:
    """A message of each of two pairs, beside a collective of each part: one rank of a part launches its message before
    the collective, the other after it. Threads of links may do so, as the hosts of both pairs are ready."""
    prefill, decode = Meeting("prefill", 2), Meeting("decode", 2)
    first, second = Meeting("first pair", 2, pages=True), Meeting("second pair", 2, pages=True)
    for device, launches in zip(
        devices, [(first, prefill), (prefill, second), (decode, first), (second, decode)], strict=True
    ):
        for meeting in launches:
            with device.stream(device.Stream()):
                device.follow(device.Stream(), meeting)


def run(way: Any, senders: int, receivers: int, number: int, before: int, in_order: bool = False) -> Queues:
    """Two ranks get a prompt each; ``before`` streams exist when those of links are made."""
    queues = Queues(number)
    devices = [Device(queues, rank, in_order) for rank in range(senders + receivers)]
    for device in devices:
        for _ in range(before):
            device.Stream()
    way(queues, devices, senders, sorted({senders, senders + receivers - 1}))
    return queues


@pytest.mark.parametrize("number", [8, 32])
@pytest.mark.parametrize(("senders", "receivers"), PARTS)
def test_nothing_hangs(senders: int, receivers: int, number: int) -> None:
    for before in range(0, 8, 1 if senders < 8 else 4):
        queues = run(run_linked, senders, receivers, number, before)
        assert queues.empty
        assert max(queues.held.values()) == 1, "and its other side is about to launch"


def test_messages_in_the_launch_order_of_steps_would_hang() -> None:
    """Where a kernel of NCCL waits for those that its host launched before."""
    assert run(run_crossed, 2, 2, 32, 0).empty
    assert not run(run_crossed, 2, 2, 32, 0, in_order=True).empty
