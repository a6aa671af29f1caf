"""KV events as vLLM publishes them: which blocks (pages) the prefix cache holds, for routers that follow it.

A message has three frames: the topic, its number (8 bytes, the highest first) and a ``KVEventBatch`` in MessagePack. As
in vLLM since 0.28, a batch is an array, and an event a map whose ``type`` is its class. A subscriber finds a lost
message by its number.

A block is stored as soon as any rank has it, and removed when no rank has it any longer, on its device or in its host
memory: any of them serves a request that begins with it. All ranks count the pages of all ranks, so rank 0 knows them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import zmq

from dsa_engine.engine.requests.request import Request

_MEDIUM = "GPU"


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The option ``kv_events_config``, with vLLM's names. ``endpoint``: ZMQ's address. With the host ``*`` or 127.0.0.1
    (other than in vLLM), or with ``ipc://``, subscribers connect to it; to any other one, this connects. A subscriber
    can read prompts."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    topic: str = ""
    hwm: int = 100_000  # number of messages that are kept for a slow subscriber


class _Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(_Event):
    """Blocks that follow each other. ``extra_keys``: for each block what else its digest covers: the first one's cache
    salt."""

    block_hashes: list[bytes]  # digests of the blocks, of 16 bytes each; see ``PageDigests``
    parent_block_hash: bytes | None  # that of the block before; None: the first block is the first of its request
    token_ids: list[int]  # of all blocks, ``block_size`` each
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(_Event):
    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(_Event):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """The events of a step; ``ts`` in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class KVEvents:
    """Collects the events of a step, and publishes them; one thread uses it."""

    def __init__(self, given: dict[str, Any], page_size: int):
        try:
            config = msgspec.convert(given, KVEventsConfig)
        except msgspec.ValidationError as error:
            names = ", ".join(KVEventsConfig.__struct_fields__)
            raise ValueError(f"kv_events_config: {error}; it may have {names}, and no replay_endpoint") from None
        self._block_size = page_size
        self.where = {"endpoint": config.endpoint, "topic": config.topic}
        self._topic, self._number = config.topic.encode(), 0
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._stored: set[bytes] = set()  # blocks that subscribers know of
        self._dropped: dict[bytes, None] = {}  # blocks that the last rank has lost since the last step
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self._socket.setsockopt(zmq.LINGER, 0)
        binds = config.endpoint.startswith(("tcp://*:", "tcp://127.0.0.1:", "ipc://", "inproc://"))
        try:
            (self._socket.bind if binds else self._socket.connect)(config.endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise ValueError(f"kv_events_config: endpoint {config.endpoint!r}: {error}") from None

    def forgotten(self, digest: bytes) -> None:
        self._dropped[digest] = None

    def stored(self, request: Request, digests: Sequence[bytes], first: int) -> None:
        """Pages of a request from page ``first`` on are named; ``digests`` are those of all its pages, to the last."""
        for digest in digests[first:]:
            self._dropped.pop(digest, None)  # it is back
        while first < len(digests) and digests[first] in self._stored:
            first += 1
        if first == len(digests):
            return
        new, size = list(digests[first:]), self._block_size
        self._stored.update(new)
        salt: list[tuple[str, ...] | None] | None = None
        if request.cache_salt is not None and not first:
            salt = [(request.cache_salt,), *[None] * (len(new) - 1)]
        tokens = request.tokens(first * size, len(new) * size).tolist()
        parent = digests[first - 1] if first else None
        self._events.append(BlockStored(new, parent, tokens, size, None, _MEDIUM, None, salt))

    def cleared(self) -> None:
        self._stored.clear()
        self._dropped.clear()
        self._events = [AllBlocksCleared()]

    def publish(self) -> None:
        """Sends the events since the last call, if there are any."""
        gone = [one for one in self._dropped if one in self._stored]
        self._dropped.clear()
        if gone:
            self._stored.difference_update(gone)
            self._events.append(BlockRemoved(gone, _MEDIUM))
        if not self._events:
            return
        payload = msgspec.msgpack.encode(KVEventBatch(time.time(), self._events, 0))
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), payload))
        self._events, self._number = [], self._number + 1

    def close(self) -> None:
        self._socket.close()
