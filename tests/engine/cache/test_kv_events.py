"""KV events, as a subscriber gets them over ZMQ: what is stored, removed and cleared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from dsa_engine import SamplingParams
from dsa_engine.engine.cache.kv_events import KVEventBatch, KVEvents
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler
from scheduling import launch, read

PAGE = 4


class Subscriber:
    """Gets the events of an endpoint, in order and without a gap."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe(b"kv")
        self._number: int | None = None

    def until_connected(self, events: KVEvents) -> None:
        for _ in range(200):
            events.cleared()
            events.publish()
            if self._socket.poll(50):
                break
        while self._socket.poll(200):
            self.batch()

    def batch(self) -> list[Any]:
        """The events of the next message."""
        assert self._socket.poll(10_000)
        topic, number, payload = self._socket.recv_multipart()
        assert (topic, len(number)) == (b"kv", 8)
        if self._number is not None:
            assert int.from_bytes(number, "big") == self._number + 1
        self._number = int.from_bytes(number, "big")
        plain = msgspec.msgpack.decode(payload)
        assert isinstance(plain, list) and abs(plain[0] - time.time()) < 60 and plain[2] == 0
        assert {event["type"] for event in plain[1]} <= {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
        return msgspec.msgpack.decode(payload, type=KVEventBatch).events

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture
def following(tmp_path: Path) -> Iterator[Callable[..., tuple[Scheduler, KVEvents, Subscriber]]]:
    made: list[Any] = []

    def make(world: int = 1, pages: int = 8, **options: Any) -> tuple[Scheduler, KVEvents, Subscriber]:
        endpoint = f"ipc://{tmp_path}/kv"
        events = KVEvents({"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv"}, PAGE)
        scheduler = Scheduler(
            Capacity(world, world, pages, PAGE), events=events,
            rank=0, max_num_seqs=8, max_num_batched_tokens=64, max_prefill_share=1.0, **options,
        )  # fmt: skip
        subscriber = Subscriber(endpoint)
        made.extend((events, subscriber))
        subscriber.until_connected(events)
        return scheduler, events, subscriber

    yield make
    for one in made:
        one.close()


def compute(scheduler: Scheduler, number: int, prompt: list[int], **given: Any) -> None:
    """Prefills a request, samples one token, and ends it."""
    request = Request(number, prompt, SamplingParams(max_tokens=1), **given)
    scheduler.add(request)
    while not request.output:
        step = scheduler.schedule()
        scheduler.ledger.moves(step.chunks)
        read(scheduler, launch(scheduler, step), lambda _: 7)


@pytest.mark.parametrize("world", [1, 2])
def test_stored_removed_and_cleared(following: Any, world: int) -> None:
    scheduler, events, subscriber = following(world)
    prompt = list(range(100, 111))
    compute(scheduler, 0, prompt)
    events.publish()
    (first,) = subscriber.batch()
    assert (first.token_ids, first.block_size, first.parent_block_hash) == (prompt[:8], PAGE, None)
    assert len(first.block_hashes) == 2 and (first.lora_id, first.medium, first.lora_name) == (None, "GPU", None)
    compute(scheduler, 1, [*prompt[:8], 1, 2, 3, 4, 5])  # begins like the first
    events.publish()
    (second,) = subscriber.batch()
    assert second.parent_block_hash == first.block_hashes[-1] and second.token_ids == [1, 2, 3, 4]
    compute(scheduler, 2, list(range(200, 228)))  # evicts all that it has no room for
    events.publish()
    third, removed = subscriber.batch()
    assert len(third.block_hashes) == 7 and third.parent_block_hash is None
    assert set(removed.block_hashes) < {*first.block_hashes, *second.block_hashes}
    events.publish()  # nothing
    scheduler.prefix_cache.reset()
    events.publish()
    assert [type(event).__name__ for event in subscriber.batch()] == ["AllBlocksCleared"]
    compute(scheduler, 3, prompt)
    events.publish()
    assert subscriber.batch() == [first]


def test_salts_and_host_memory(following: Any) -> None:
    """A page whose copy is in host memory is not removed."""
    scheduler, events, subscriber = following(pages=2, host_pages=2)
    compute(scheduler, 0, [1, 2, 3, 4, 5, 6, 7], cache_salt="mine")
    compute(scheduler, 1, [11, 12, 13, 14, 15])
    events.publish()
    mine, other = subscriber.batch()
    assert (mine.extra_keys, other.extra_keys) == ([("mine",)], None)
    compute(scheduler, 2, [21, 22, 23, 24, 25])
    compute(scheduler, 3, [31, 32, 33, 34, 35])
    events.publish()
    *stored, removed = subscriber.batch()
    assert len(stored) == 2 and removed.block_hashes == mine.block_hashes


@pytest.mark.parametrize(
    "given", [{"replay_endpoint": "tcp://*:1"}, {"publisher": "null"}, {"hwm": "5"}, {"endpoint": "tcp://*:no"}]
)
def test_bad_configurations(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="kv_events_config"):
        KVEvents({"enable_kv_cache_events": True, **given}, PAGE)
