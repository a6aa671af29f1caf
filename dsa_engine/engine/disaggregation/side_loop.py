"""What both loops have in common: messages of the other side come between two steps, as a caller's do.

The leaders of the sides have a line, which runs while both run steps.
"""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import torch

from dsa_engine.engine.calls.call import Message
from dsa_engine.engine.disaggregation.messages import LineBroken
from dsa_engine.engine.disaggregation.side import Side
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.loop import EngineLoop
from dsa_engine.parallel.group import Group

_HEARTBEAT_S = 5.0  # most seconds between two messages, so that an idle line is no broken one: None is sent
_END = "end"  # the last message
_CLOSE_S = 10.0  # longest wait for the last messages of the other side


class LeaderLine:
    """One end of the lines to leaders, ``Side.lines``. A thread sends, another receives; no call waits. ``deliver``:
    called in a thread with each message; the last one is a ``LineBroken`` if an error ends the line."""

    def __init__(self, groups: Sequence[Group], timeout: float, deliver: Callable[[Any], None]):
        self._groups = groups
        self._pause = min(_HEARTBEAT_S, timeout / 4)
        self._deliver = deliver
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._watched, args=(work,), name="dsa_engine leaders", daemon=True)
            for work in (self._send_all, self._receive_all)[: len(groups)]
        ]
        for thread in self._threads:
            thread.start()

    def send(self, message: Any) -> None:
        self._queue.put(message)

    def close(self, wait_s: float) -> None:
        """Sends what is left, and waits for the end of the others' messages."""
        self._closing = True
        self._queue.put(_END)
        for thread in self._threads:
            thread.join(wait_s)

    def _watched(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            if not self._closing:
                self._deliver(LineBroken(f"{type(error).__name__}: {error}"))

    def _send_all(self) -> None:
        line, message = self._groups[0], None
        to = 0 if line.index == 1 else 1  # to the prefill side's leader, or to the decode side's
        while message != _END:
            try:
                message = self._queue.get(timeout=self._pause)
            except queue.Empty:
                message = None
            payload = pickle.dumps(message)
            line.send(torch.tensor([len(payload)]), to)
            line.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to)

    def _receive_all(self) -> None:
        line = self._groups[1]
        senders = set(range(line.size)) - {line.index}
        while senders:
            length = torch.empty(1, dtype=torch.int64)
            source = line.recv_any(length)
            payload = line.recv(torch.empty(int(length), dtype=torch.uint8), source)
            message = pickle.loads(bytes(payload.numpy()))
            if message == _END:
                senders.remove(source)
                if source == 1 - line.index and not self._closing:
                    self._deliver(LineBroken("their leader has left"))
            elif message is not None:
                self._deliver(message)


class SideLoop(EngineLoop):
    """The leaders' messages reach the other ranks of their part by its own channel."""

    def __init__(self, engine: Engine, side: Side):
        self.side = side
        super().__init__(engine)

    def _main(self) -> None:
        # In the loop's thread, when all of the loop is made.
        lines, timeout = self.side.lines, self.side.mesh.config.timeout
        self._end_of_line = LeaderLine(lines, timeout, self._delivered) if lines else None
        self._line = self._end_of_line if len(lines) == 2 else None
        super()._main()

    def tell(self, message: Any) -> None:
        """Sends the other side a message; does nothing on ranks that do not lead, which have the same to say."""
        if self._line is not None:
            self._line.send(message)

    def tell_leader(self, message: Any) -> None:
        """Sends a message to all ranks of this side, by way of its leader; on the decode side."""
        if self._line is not None:
            self._delivered(message)
        elif self._end_of_line is not None:
            self._end_of_line.send(message)

    def _delivered(self, message: Any) -> None:
        self.calls.put((message, None))

    def _take(self, message: Message | Any) -> None:
        if isinstance(message, LineBroken):
            if self._closing:
                return
            other = "decode" if self.side.prefills else "prefill"
            raise RuntimeError(f"the ranks that {other} cannot be reached any more: {message.error}")
        super()._take(message)

    def _end(self) -> None:
        if self.error is None:
            for end in (self.side.sender, self.side.receiver):
                if end is not None:
                    end.close()
            if self._end_of_line is not None:
                self._end_of_line.close(_CLOSE_S)
        super()._end()
