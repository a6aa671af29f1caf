"""A record of a rank's collectives: bytes, order, and the times at which each begins and is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv"]


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

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent)


@dataclass
class Event:
    """The begin of a collective, or the wait for an asynchronous one; the log makes the marks."""

    what: Literal["begin", "wait"]
    number: int  # number of the collective in the log
    before: Any = None
    after: Any = None


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

    def begin(self, collective: Collective) -> Event:
        self.collectives.append(collective)
        return self._event("begin", len(self.collectives) - 1)

    def wait(self, number: int) -> Event:
        return self._event("wait", number)

    def _event(self, what: Literal["begin", "wait"], number: int) -> Event:
        event = Event(what, number, self.mark())
        self.events.append(event)
        return event
