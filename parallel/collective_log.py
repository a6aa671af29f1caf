"""A record of a rank's collectives: bytes, order, and the times at which each begins and is waited for.

What a side stream does is recorded too: a *task* of it begins where the main stream starts it, and ends where the main
stream waits for it. On a CPU a task runs in parts among the main work, and its events say so. No task starts another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]
Moment = Literal["begin", "wait", "fork", "enter", "leave", "join"]


@dataclass(frozen=True)
class Collective:
    """One collective, as one rank of its group sees it.

    ``sent`` and ``received`` are payload bytes to and from every rank of the group, 0 for the rank itself. For
    "all_gather" and "reduce_scatter" they are the size of one rank's part, for "all_reduce" the size of the whole.
    "send" and "recv" are the two sides of a point-to-point message.
    """

    kind: Kind
    ranks: tuple[int, ...]
    index: int  # index of this rank in ``ranks``
    sent: tuple[int, ...]
    received: tuple[int, ...]
    asynchronous: bool = False  # issued before other work and waited for after it
    stage: str = ""  # stage of the forward pass
    communicator: int = 0  # groups of the same ranks have several, each with an order of its own

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent)


@dataclass
class Event:
    """The begin of a collective, or the wait for an asynchronous one. Of a task of a side stream: the place where the
    main stream starts it ("fork"), the begin and the end of a part of it, and the place where the main stream waits for
    it ("join"). The log makes the marks."""

    what: Moment
    number: int  # number of the collective, or of the task, in the log
    before: Any = None
    after: Any = None
    stage: str = ""  # stage of the forward pass in which a task is begun or waited for


@dataclass
class CollectiveLog:
    """A rank's collectives, in the order of its program; one log may serve several groups.

    Attributes:
        mark: called before and after each collective and wait; the event keeps its result.
        stage: returns the current stage of the forward pass.
    """

    mark: Callable[[], Any] = lambda: None
    stage: Callable[[], str] = lambda: ""
    collectives: list[Collective] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tasks: int = 0

    def begin(self, collective: Collective) -> Event:
        self.collectives.append(collective)
        return self._event("begin", len(self.collectives) - 1)

    def wait(self, number: int) -> Event:
        return self._event("wait", number)

    def fork(self) -> int:
        """The main stream starts a task of a side stream; returns its number."""
        self.tasks += 1
        return self._moment("fork", self.tasks - 1)

    @contextmanager
    def part(self, task: int) -> Iterator[None]:
        """What runs inside is a part of a task."""
        self._moment("enter", task)
        try:
            yield
        finally:
            self._moment("leave", task)

    def join(self, task: int) -> None:
        """The main stream waits for a task."""
        self._moment("join", task)

    def _moment(self, what: Moment, task: int) -> int:
        event = self._event(what, task)
        event.after, event.stage = event.before, self.stage()
        return task

    def _event(self, what: Moment, number: int) -> Event:
        event = Event(what, number, self.mark())
        self.events.append(event)
        return event
