"""Calls: the requests of one caller, in a thread or an event loop, and its wait for their results.

Requests end with their call, however the call ends. An interrupt may hit the very line that closes it; then the garbage
collector closes it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from dsa_engine.engine.agreement import CallsDiffer, agree_on_call, declare_following, others_follow
from dsa_engine.engine.loop import EngineLoop
from dsa_engine.engine.mailbox import EventLoopMailbox, Mailbox
from dsa_engine.engine.reply import Reply
from dsa_engine.engine.requests.messages import Abort, Add, Job, Run
from dsa_engine.outputs import StreamPiece
from dsa_engine.text.tokenizer import Tokenizer

_TICK_S = 0.2  # seconds between two updates of a progress bar


class Entrance(Protocol):
    """What a :class:`Call` needs.

    Attributes:
        ids: gives messages their numbers.
        stream_interval: tokens of a piece of a stream, after the first.
    """

    @property
    def ids(self) -> Iterator[int]: ...
    @property
    def stream_interval(self) -> int: ...

    def send(self, kind: str, messages: Sequence[tuple[Add | Run, Reply | Mailbox]]) -> None:
        """Sends the messages of a call, each with the receiver of its results."""
        ...

    def abort(self, ids: tuple[int, ...]) -> None:
        """Ends requests and jobs; those that have ended are ignored."""
        ...


class LoopEntrance:
    """The :class:`Entrance` of an engine in this process."""

    def __init__(self, loop: EngineLoop):
        self.loop = loop
        self._mesh = loop.engine.mesh
        self._thread = threading.get_ident()

    def check(self, asynchronous: bool = False) -> None:
        """Checks that this thread, or its event loop, may call now.

        Raises:
            RuntimeError: the loop has ended; this is the loop's thread; or all ranks call, and this is not the thread
                that made the engine.
        """
        self.loop.check()
        if self.loop.serves:
            return
        if not (asynchronous or self._thread != threading.get_ident() or self._mesh.has_counterpart):
            return
        if self._mesh.is_front and others_follow(self._mesh, self.loop.check):
            self.loop.serves = True
            return
        if self._mesh.has_counterpart:
            raise RuntimeError("with prefill_ranks rank 0 alone calls; let all other ranks follow()")
        raise RuntimeError(
            "on several ranks, only the thread that has made the LLM may use it (and no asynchronous call), unless all "
            "ranks but rank 0 follow(): requests of several threads would come in another order on each rank"
        )

    def send(self, kind: str, messages: Sequence[tuple[Add | Run, Reply | Mailbox]]) -> None:
        """Sends the messages of a call, each with the receiver of its results; if every rank calls, compares the calls.

        Raises:
            ValueError: the ranks are in different calls.
        """
        if self.loop.serves:
            self.loop.send(*messages)
            return
        prompts = [message.prompt_ids for message, _ in messages]
        params = [message.params for message, _ in messages if isinstance(message, Add)]
        leads, ids = self._mesh.rank == 0, tuple(message.id for message, _ in messages)
        try:
            if not leads:  # registers the receivers before rank 0 sends the messages
                self.loop.send(*messages)
            self.loop.serves = agree_on_call(self._mesh, kind, prompts, params, self.loop.check, ids)
            if leads:
                self.loop.send(*messages)
        except CallsDiffer as error:
            self.loop.send((Abort(ids), None))
            # All ranks go on numbering after the ids of rank 0's call, whose Abort may still be under way.
            if error.next_id is not None:
                self.loop.engine.ids = count(error.next_id)
            elif ids:
                self.loop.engine.ids = count(ids[0])
            raise

    def abort(self, ids: tuple[int, ...]) -> None:
        self.loop.send((Abort(ids), None))

    @property
    def ids(self) -> Iterator[int]:
        return self.loop.engine.ids

    @property
    def stream_interval(self) -> int:
        return self.loop.engine.options.stream_interval

    def follow(self) -> None:
        """Serves rank 0's calls until rank 0 closes.

        Raises:
            RuntimeError: this is rank 0, or the only rank.
            BaseException: the error that ends this rank's loop.
        """
        self.loop.check()
        if self._mesh.is_front:
            raise RuntimeError("rank 0 is the rank that the others follow(); it calls, and closes the LLM at the end")
        declare_following(self._mesh)
        self.loop.wait()


class Call:
    """Requests that are made together and end together, at the latest with :meth:`close`.

    Args:
        streams: deliver results as pieces; otherwise :meth:`Reply.completion` gives them when all requests have ended.
        asynchronous: the caller waits in the running event loop.
    """

    _ids: Sequence[int] = ()  # the id of a running job
    replies: Sequence[Reply] = ()

    def __init__(self, callers: Entrance, streams: bool = False, asynchronous: bool = False):
        self._callers = callers
        self._streams = streams
        self._mailbox: Any = EventLoopMailbox() if asynchronous else SimpleQueue()

    def begin(self, kind: str, adds: Sequence[tuple[Add, Tokenizer | None]]) -> None:
        """Sends the requests, each with the tokenizer for its text; raises what :meth:`Entrance.send` raises."""
        for add, _ in adds:
            add.id = next(self._callers.ids)
        interval = self._callers.stream_interval if self._streams else None
        self.replies = [
            Reply(add, tokenizer, self._mailbox, interval, index) for index, (add, tokenizer) in enumerate(adds)
        ]
        self._callers.send(kind, [(reply.add, reply) for reply in self.replies])

    def wait(self, tick: Callable[[], object] | None = None) -> None:
        """Waits until all requests have ended; calls ``tick`` now and then.

        Raises:
            BaseException: the error of a step of one of the requests, or the error that ended the loop.
        """
        for _ in self.replies:
            _raised(self._get(tick))

    async def wait_async(self) -> None:
        """Like :meth:`wait`, but does not block the event loop."""
        for _ in self.replies:
            _raised(await self._mailbox.get())

    def piece(self) -> StreamPiece:
        """Waits for the next piece; raises what :meth:`wait` raises."""
        return _raised(self._get(None))

    async def piece_async(self) -> StreamPiece:
        """Like :meth:`piece`, but does not block the event loop."""
        return _raised(await self._mailbox.get())

    def run(self, job: Job, prompt_ids: list[int]) -> torch.Tensor:
        """Runs a job and returns its result; raises what :meth:`wait` raises."""
        run = Run(next(self._callers.ids), job, prompt_ids)
        self._ids = (run.id,)
        self._callers.send(job, [(run, self._mailbox)])
        result = _raised(self._get(None))
        self._ids = ()
        return result

    def _get(self, tick: Callable[[], object] | None) -> Any:
        while tick is not None:
            try:
                return self._mailbox.get(timeout=_TICK_S)
            except queue.Empty:
                tick()
        return self._mailbox.get()

    def close(self) -> None:
        """Aborts requests and jobs that have not ended."""
        ids = (*self._ids, *(reply.add.id for reply in self.replies if reply.ending is None))
        if ids:
            self._callers.abort(ids)
        self._ids = self.replies = ()

    __del__ = close

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raised(item: Any) -> Any:
    """Returns an item of a mailbox; raises it if it is an exception."""
    if isinstance(item, BaseException):
        raise item
    return item
