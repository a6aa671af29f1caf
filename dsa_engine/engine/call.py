"""A caller's requests, from a thread or an event loop, and its wait for what comes of them.

Requests end with their call: however it ends, and whether or not it could say so. An interrupt may hit the very line
that was to do it; then the call is left to the garbage collector, which does it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Any

import torch

from dsa_engine.engine.agreement import CallsDiffer, agree_on_call, leave_word_to_follow, others_follow
from dsa_engine.engine.loop import EngineLoop
from dsa_engine.engine.reply import Mailbox, Reply
from dsa_engine.engine.requests.messages import Abort, Add, Job, Run
from dsa_engine.outputs import StreamPiece
from dsa_engine.text.tokenizer import Tokenizer

_TICK_S = 0.2  # how often a caller with a progress bar looks at it


class EventLoopMailbox:
    """Results for a task of the running event loop, put there by other threads."""

    def __init__(self) -> None:
        self._event_loop = asyncio.get_running_loop()
        self._items: deque[Any] = deque()
        self._filled = asyncio.Event()

    def put(self, item: Any, /) -> None:
        self._items.append(item)
        with suppress(RuntimeError):  # the event loop has been closed, and the task with it
            self._event_loop.call_soon_threadsafe(self._filled.set)

    async def get(self) -> Any:
        while not self._items:
            self._filled.clear()
            if not self._items:
                await self._filled.wait()
        return self._items.popleft()


class Callers:
    """The way in for callers: who may call, and on several ranks that all want the same.

    Args:
        loop: that runs the engine.
    """

    def __init__(self, loop: EngineLoop):
        self.loop = loop
        self._mesh = loop.engine.mesh
        self._thread = threading.get_ident()

    def check(self, asynchronous: bool = False) -> None:
        """Whether this thread, or its event loop, may call now.

        Raises:
            RuntimeError: the loop has ended; this is its thread; or, on several ranks that all call, it is another
                thread than the one that made the engine.
        """
        self.loop.check()
        if self.loop.serves or not (asynchronous or self._thread != threading.get_ident()):
            return
        if self._mesh.rank == 0 and others_follow(self._mesh, self.loop.check):
            self.loop.serves = True
            return
        raise RuntimeError(
            "on several ranks, only the thread that has made the LLM may use it (and no asynchronous call), unless all "
            "ranks but rank 0 follow(): requests of several threads would come in another order on each rank"
        )

    def send(self, kind: str, messages: Sequence[tuple[Add | Run, Reply | Mailbox]]) -> None:
        """Sends the messages of a call, each with where its results go; where every rank calls, once all want the same.

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
            if not leads:  # this rank knows where results go before rank 0 has sent anything
                self.loop.send(*messages)
            self.loop.serves = agree_on_call(self._mesh, kind, prompts, params, self.loop.check, ids)
            if leads:
                self.loop.send(*messages)
        except CallsDiffer as error:
            self.loop.send((Abort(ids), None))
            # The same on all ranks again; never one that rank 0 has used, whose Abort may still be under way.
            if error.next_id is not None:
                self.loop.engine.ids = count(error.next_id)
            elif ids:
                self.loop.engine.ids = count(ids[0])
            raise

    def follow(self) -> None:
        """Serves rank 0's calls until it closes, and raises what ends its loop otherwise.

        Raises:
            RuntimeError: this is rank 0, or the only one.
        """
        self.loop.check()
        if self._mesh.rank == 0:
            raise RuntimeError("rank 0 is the rank that the others follow(); it calls, and closes the LLM at the end")
        leave_word_to_follow(self._mesh)
        self.loop.wait()


class Call:
    """Requests that are made together and end together, with :meth:`close` at the latest.

    Args:
        callers: the way in.
        streams: results are pieces; else what :meth:`Reply.completion` gives when all have ended.
        asynchronous: results are waited for in the running event loop.
    """

    _ids: Sequence[int] = ()  # of a job
    replies: Sequence[Reply] = ()

    def __init__(self, callers: Callers, streams: bool = False, asynchronous: bool = False):
        self._callers = callers
        self._streams = streams
        self._mailbox: Any = EventLoopMailbox() if asynchronous else SimpleQueue()

    def begin(self, kind: str, adds: Sequence[tuple[Add, Tokenizer | None]]) -> None:
        """Sends the requests, each with what makes text of its output; raises as :meth:`Callers.send`."""
        for add, _ in adds:
            add.id = next(self._callers.loop.engine.ids)
        self.replies = [Reply(add, tokenizer, self._mailbox, self._streams) for add, tokenizer in adds]
        self._callers.send(kind, [(reply.add, reply) for reply in self.replies])

    def wait(self, tick: Callable[[], object] | None = None) -> None:
        """Returns when all requests have ended; ``tick`` is called now and then.

        Raises:
            BaseException: of a step that one of them was part of, or what has ended the engine.
        """
        for _ in self.replies:
            _raised(self._get(tick))

    async def wait_async(self) -> None:
        """:meth:`wait` for an event loop, which goes on meanwhile."""
        for _ in self.replies:
            _raised(await self._mailbox.get())

    def piece(self) -> StreamPiece:
        """The next piece; raises as :meth:`wait`."""
        return _raised(self._get(None))

    async def piece_async(self) -> StreamPiece:
        """:meth:`piece` for an event loop, which goes on meanwhile."""
        return _raised(await self._mailbox.get())

    def run(self, job: Job, prompt_ids: list[int]) -> torch.Tensor:
        """Does what needs the engine for itself, and returns what comes of it; raises as :meth:`wait`."""
        run = Run(next(self._callers.loop.engine.ids), job, prompt_ids)
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
        """Aborts what has not ended."""
        ids = (*self._ids, *(reply.add.id for reply in self.replies if reply.ending is None))
        if ids:
            self._callers.loop.send((Abort(ids), None))
        self._ids = self.replies = ()

    __del__ = close

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raised(item: Any) -> Any:
    """What a mailbox has given, unless it is an exception, which is raised."""
    if isinstance(item, BaseException):
        raise item
    return item
