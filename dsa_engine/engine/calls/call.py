"""Between callers and the loop: the messages, the one queue that takes them, and the inboxes of results.

Callers run in any threads and event loops. Callers and the loop share no lock of Python: an interrupted caller could
leave it locked.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Protocol

from dsa_engine.engine.calls.jobs import Job, Run
from dsa_engine.engine.calls.reply import Failure, Inbox, Reader, Reply
from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.samples import Ended, StepTokens
from dsa_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the HTTP processes need no PyTorch, here and in what this imports
    import torch

CLOSED = "the LLM has been closed; make another one"
_TICK_S = 0.2  # seconds between two updates of a progress bar


@dataclass(frozen=True)
class Abort:
    """Ends these requests and jobs; ids of those that have ended or never came are ignored."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class CallResult:
    """For the other ranks: the next result of rank 0's call ``number``, see :class:`.spmd.SpmdCalls`."""

    number: int
    result: Any


@dataclass(frozen=True)
class Shutdown:
    """Ends the loop on all ranks and aborts running requests."""


@dataclass(frozen=True)
class PrefillLimit:
    """From now on a group's prefill step has at most so many tokens while requests decode."""

    tokens: int


@dataclass(frozen=True)
class Compiled:
    """The grammar of this new request is compiled on rank 0, where a thread has sent this; the request may begin."""

    id: int


Message = Add | Abort | Run | CallResult | Compiled | PrefillLimit | Shutdown


class Mailbox(Protocol):
    """Takes a caller's results; any thread may put one in, and the caller raises an exception that it receives."""

    def put(self, item: Any, /) -> None: ...


Sent = tuple[Message, Mailbox | None]  # a message and the mailbox of its results: a request's is a Reader


class CallInbox(Inbox):
    """Gets results from the loop's thread for the thread of a call, which takes them as it waits."""

    def __init__(self, abort: Callable[[Sequence[int]], object]):
        super().__init__(abort)
        self._items: SimpleQueue[StepTokens | Failure] = SimpleQueue()
        self.put = self._items.put  # type: ignore[method-assign]

    def wait(self, seconds: float | None) -> None:
        """Gives replies the next item, if one comes within this time."""
        with suppress(queue.Empty):
            super().put(self._items.get(timeout=seconds))


class EventLoopInbox(Inbox):
    """Gets results from the loop's thread for all calls of the running event loop, which takes them together: waking it
    is a system call, in which the loop's thread may lose Python's lock."""

    def __init__(self, abort: Callable[[Sequence[int]], object]):
        super().__init__(abort)
        self.event_loop = asyncio.get_running_loop()

    def put(self, item: StepTokens | Failure, /) -> None:
        with suppress(RuntimeError):  # the event loop has been closed, and no task waits
            self.event_loop.call_soon_threadsafe(super().put, item)


class MessageQueue(Protocol):
    """Takes the messages of callers, for an engine in this process or in another; ``ids`` numbers them."""

    ids: Iterator[int]

    def check(self) -> None: ...
    def put(self, *messages: Sent) -> None: ...
    def abort(self, ids: Sequence[int]) -> None: ...
    def inbox(self) -> Inbox: ...  # of the running event loop


class CallQueue:
    """The messages of this process's callers on their way to the loop, and where their results go."""

    def __init__(self, here: bool):
        self.here = here  # whether this is rank 0, or the only process
        self.ids: Iterator[int] = count()  # of requests and jobs; a request without a seed gets one made from its own
        self.closed = False
        self._messages: SimpleQueue[tuple[Sent, ...]] = SimpleQueue()
        self._mailboxes: dict[int, Mailbox] = {}  # by id: of requests (readers) and jobs whose callers wait
        self._inboxes: list[EventLoopInbox] = []
        self._refusal: BaseException | None = None  # why the loop has ended
        self._taker: int | None = None  # the loop's thread

    def check(self) -> None:
        if threading.get_ident() == self._taker:
            raise RuntimeError("a call from within another call of the same thread, which would wait for it")
        if self.closed or self._refusal is not None:
            raise self._refusal or RuntimeError(CLOSED)
        if not self.here:
            raise RuntimeError("rank 0 calls in event loops; other ranks follow(), or generate(), chat() and stream()")

    def inbox(self) -> Inbox:
        running = asyncio.get_running_loop()
        self._inboxes = [one for one in self._inboxes if not one.event_loop.is_closed()]
        for one in self._inboxes:
            if one.event_loop is running:
                return one
        self._inboxes.append(EventLoopInbox(self.abort))
        return self._inboxes[-1]

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests and jobs; a destructor may call it."""
        self.put((Abort(tuple(ids)), None))

    def put(self, *messages: Sent) -> None:
        """Sends messages, which take effect together. It cannot fail, and a destructor may call it."""
        self._messages.put(messages)
        if self._refusal is not None:
            self._refuse(self._refusal)

    def end(self, refusal: BaseException) -> None:
        """Gives all callers the reason, those that wait and those that come."""
        self._refusal, self._taker = refusal, None
        for mailbox in {*self._mailboxes.values()}:
            mailbox.put(Failure(None, refusal) if isinstance(mailbox, Reader) else refusal)
        self._refuse(refusal)

    def _refuse(self, refusal: BaseException) -> None:
        with suppress(queue.Empty):
            while True:
                for message, mailbox in self._messages.get_nowait():
                    if mailbox is not None:
                        mailbox.put(Failure(message.id, refusal) if isinstance(message, Add) else refusal)

    # Methods of the loop's thread.

    def take(self, wait_s: float | None) -> list[Message]:
        """Takes the messages that are there; waits ``wait_s`` seconds for the first one, None: without limit."""
        self._taker = threading.get_ident()
        messages: list[Message] = []
        with suppress(queue.Empty):
            while True:
                wait = 0.0 if messages else wait_s
                for message, mailbox in self._messages.get(wait != 0.0, wait):
                    messages.append(message)
                    if isinstance(message, Add | Run) and mailbox is not None:
                        self._mailboxes[message.id] = mailbox
                    elif isinstance(message, Abort):
                        for number in message.ids:
                            self._mailboxes.pop(number, None)
        return messages

    def reader(self, number: int) -> Reader | None:
        """The reader of a request's tokens; None if no caller waits for them here."""
        reader = self._mailboxes.get(number)
        return reader if isinstance(reader, Reader) else None

    def answer(self, step: StepTokens) -> None:
        """Gives callers their parts of a step."""
        parts: dict[Mailbox, list[int]] = {}
        for number, reader in enumerate(map(self._mailboxes.get, step.ids.tolist())):
            if reader in parts:
                parts[reader].append(number)
            elif reader is not None:
                parts[reader] = [number]
        ended: dict[Mailbox, list[Ended]] = {}
        for one in step.ended:
            if (reader := self._mailboxes.pop(one.id, None)) is not None:
                ended.setdefault(reader, []).append(one)
        for reader in {**parts, **ended}:
            reader.put(step.of(parts.get(reader, ()), ended.get(reader, [])))

    def fail(self, number: int, error: BaseException) -> None:
        """Gives a caller the error that ends a request."""
        if (reader := self._mailboxes.pop(number, None)) is not None:
            reader.put(Failure(number, error))

    def last(self, number: int, item: object) -> None:
        """Gives a caller the result of a job, or the error that ends it."""
        mailbox = self._mailboxes.pop(number, None)
        if mailbox is not None:
            mailbox.put(item)


class Call:
    """A caller's requests that are made together, or its job, and its wait for their results.

    They end together, at the latest with :meth:`close`. An interrupt may hit the very line that closes it; then the
    garbage collector does. ``asynchronous``: the caller waits in the running event loop.
    """

    _ids: Sequence[int] = ()  # the id of a running job
    replies: Sequence[Reply] = ()

    def __init__(self, calls: MessageQueue, asynchronous: bool = False):
        self._calls, self._asynchronous = calls, asynchronous
        self._results: Any = _EventLoopResults() if asynchronous else deque()

    def begin(self, adds: Sequence[tuple[Add, Tokenizer | None]], stream_interval: int | None = None) -> None:
        """Sends requests, each with the tokenizer for its text; for ``stream_interval`` see :class:`Reply`."""
        for add, _ in adds:
            add.id = next(self._calls.ids)
        self._inbox = self._calls.inbox() if self._asynchronous else CallInbox(self._calls.abort)
        deliver = self._results.append
        self.replies = [
            Reply(add, tokenizer, deliver, stream_interval, index) for index, (add, tokenizer) in enumerate(adds)
        ]
        self._inbox.replies.update((reply.add.id, reply) for reply in self.replies)
        self._calls.put(*((reply.add, self._inbox) for reply in self.replies))

    def run(self, job: Job, prompt_ids: Sequence[int], call: int | None) -> torch.Tensor:
        """Raises what :meth:`get` raises."""
        run, mailbox = Run(next(self._calls.ids), job, prompt_ids, call), SimpleQueue[Any]()
        self._ids = (run.id,)
        self._calls.put((run, mailbox))
        result: torch.Tensor = _raised(mailbox.get())
        self._ids = ()
        return result

    def get(self, tick: Callable[[], object] | None = None) -> Any:
        """Waits for the next result: the end of a request, or a piece of a stream; calls ``tick`` now and then. Raises
        the error of a step of one of the requests, or the one that ended the loop."""
        assert isinstance(self._inbox, CallInbox)
        due = time.monotonic() + _TICK_S
        while not self._results:
            self._inbox.wait(None if tick is None else _TICK_S)
            if tick is not None and time.monotonic() >= due:
                tick()
                due += _TICK_S
        return _raised(self._results.popleft())

    async def all_async(self) -> list[Any]:
        """The next result, and all further ones that are there."""
        waiting = self._results
        if not waiting.items:
            await waiting.some()
        results, waiting.items = waiting.items, []
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def close(self) -> None:
        """Aborts requests and jobs that have not ended."""
        ids = (*self._ids, *(reply.add.id for reply in self.replies if reply.runs))
        for number in ids if self.replies else ():
            self._inbox.replies.pop(number, None)
        if ids:
            self._calls.abort(ids)
        self._ids = self.replies = ()

    __del__ = close

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _EventLoopResults:
    """Results for a task of the running event loop, which alone puts them in."""

    def __init__(self) -> None:
        self._event_loop, self.items = asyncio.get_running_loop(), list[Any]()
        self._waiter: asyncio.Future[None] | None = None  # of the task, while it waits

    def append(self, item: Any) -> None:
        self.items.append(item)
        if (waiter := self._waiter) is not None:
            self._waiter = None
            if not waiter.done():  # it is, if the task has been cancelled
                waiter.set_result(None)

    def some(self) -> asyncio.Future[None]:
        """For the task to await the first item."""
        self._waiter = self._event_loop.create_future()
        return self._waiter


def _raised(item: Any) -> Any:
    if isinstance(item, BaseException):
        raise item
    return item
