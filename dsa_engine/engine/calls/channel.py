"""Bytes from the first rank of a group to all of its ranks, which arrive between the same two steps on each.

A transfer runs beside a step and is finished after it, so no step waits for it. While there is nothing to compute, the
other ranks wait for the next transfer without using a core.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsa_engine.parallel.group import Group

# Bytes of every transfer, its length included; a longer payload continues in a second transfer.
_HEAD = 2048
_LENGTH = 8


class MessageChannel:
    """One rank's end of the channel. ``group``: all ranks, on the CPU; used for nothing else."""

    def __init__(self, group: Group):
        self._group = group
        self._payload = b""
        self._head = torch.zeros(_HEAD, dtype=torch.uint8)
        self._wait: Callable[[], None] | None = None

    @property
    def sends(self) -> bool:
        return self._group.index == 0

    @property
    def under_way(self) -> bool:
        """Whether a transfer has begun and not finished; the same on all ranks."""
        return self._wait is not None

    def begin(self, payload: bytes) -> None:
        """Starts a transfer; only the first rank's ``payload`` counts."""
        if self.sends:
            self._payload = payload
            self._head[:_LENGTH].view(torch.int64)[0] = len(payload)
            inline = payload[: _HEAD - _LENGTH]
            if inline:
                self._head[_LENGTH : _LENGTH + len(inline)] = torch.frombuffer(bytearray(inline), dtype=torch.uint8)
        self._wait = self._group.broadcast_async(self._head)

    def finish(self) -> bytes:
        """Returns the first rank's payload."""
        assert self._wait is not None, "a transfer is begun before it is finished"
        wait, self._wait = self._wait, None
        wait()
        length = int(self._head[:_LENGTH].view(torch.int64)[0])
        inline = min(length, _HEAD - _LENGTH)
        payload = self._payload if self.sends else bytes(self._head[_LENGTH : _LENGTH + inline].numpy())
        if length > inline:
            rest = torch.empty(length - inline, dtype=torch.uint8)
            if self.sends:
                rest = torch.frombuffer(bytearray(payload[inline:]), dtype=torch.uint8)
            self._group.broadcast_async(rest)()
            payload = payload if self.sends else payload + bytes(rest.numpy())
        return payload

    def confirm(self) -> None:
        """Waits until all ranks have called this; raises if one has not within the group's timeout."""
        self._group.all_gather(torch.zeros(1, dtype=torch.uint8))
