"""The engine's end: passes requests on to the loop, and the tokens of all requests of a step back as one message."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from dsa_engine.engine.loop import EngineLoop
from dsa_engine.engine.mailbox import WokenMailbox
from dsa_engine.engine.reply import Receiver, RequestRecord
from dsa_engine.engine.requests.messages import Abort, Add
from dsa_engine.engine.requests.request import Ending, SampledToken
from dsa_engine.llm import LLM
from dsa_engine.server.remote.channel import Channel
from dsa_engine.server.remote.messages import AskState, EngineFacts, EngineState, Failed, NewTokens


class Relay:
    """Serves the requests of another process until that process ends or :meth:`close`; then aborts them.

    Args:
        llm: serves calls of any thread: on several ranks, the others follow.
        connection: to an :class:`.client.EngineClient`.
    """

    def __init__(self, llm: LLM, connection: Connection):
        self._llm = llm
        self._ids: dict[int, int] = {}  # the engine's ids of requests that run, by the other process's
        self._channel = Channel(connection, self._take, self._abort_all)
        self._channel.send(_facts(llm))
        self._channel.start()
        watch = threading.Thread(
            target=_report_end, args=(llm.loop, self._channel), name="dsa_engine watch", daemon=True
        )
        watch.start()

    def close(self) -> None:
        """Sends what is to be sent, and closes the connection."""
        self._channel.close()

    def ended(self, number: int) -> None:
        """Called when a request has ended, with the other process's id."""
        self._ids.pop(number, None)

    def _take(self, message: Any) -> None:
        if isinstance(message, Abort):
            self._abort(message.ids)
        elif isinstance(message, AskState):
            self._channel.send(EngineState.of(self._llm.engine))
        else:
            self._llm.loop.send(*(self._request(add) for add in message))

    def _request(self, add: Add) -> tuple[Add, RelayedRequest]:
        number = add.id
        add.id = self._ids[number] = next(self._llm.engine.ids)
        return add, RelayedRequest(add, number, self, self._channel)

    def _abort_all(self) -> None:
        """The other process has ended."""
        self._abort(list(self._ids))

    def _abort(self, numbers: Iterable[int]) -> None:
        """Ends requests; the loop's thread may end some of them meanwhile."""
        ids = [self._ids.pop(number, None) for number in numbers]
        if running := tuple(number for number in ids if number is not None):
            self._llm.loop.send((Abort(running), None))


class RelayedRequest(Receiver):
    """A request whose caller is in another process.

    Args:
        number: the other process's id of the request.
    """

    def __init__(self, add: Add, number: int, relay: Relay, channel: Channel):
        super().__init__(add, _Outbox(number, channel))
        self._number, self._relay = number, relay
        self._new: NewTokens | None = None

    def take(self, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        self.ending = ending
        if ending is not None:
            self._relay.ended(self._number)
        record = None if ending is None else RequestRecord.of(self.request)
        self._new = NewTokens(self._number, tokens, ending, record)

    def hand_over(self) -> None:
        self.mailbox.put(self._new)


class _Outbox(WokenMailbox):
    """Holds a request's results until those of its step are complete."""

    def __init__(self, number: int, channel: Channel):
        super().__init__()
        self.reader = self._channel = channel
        self._number = number

    def wake(self, filled: Sequence[WokenMailbox]) -> None:
        self._channel.send([item for one in filled if isinstance(one, _Outbox) for item in one.taken()])

    def taken(self) -> list[NewTokens | Failed]:
        """The results so far, which are removed."""
        items = [Failed.of(self._number, one) if isinstance(one, BaseException) else one for one in self._items]
        self._items.clear()
        return items


def _facts(llm: LLM) -> EngineFacts:
    engine = llm.engine
    options = engine.options
    return EngineFacts(
        folder=llm.folder,
        default_sampling=llm.default_sampling,
        trust_remote_code=options.trust_remote_code,
        config=engine.config,
        capacity=engine.scheduler.capacity,
        max_model_len=engine.max_model_len,
        max_num_seqs=options.max_num_seqs,
        stream_interval=options.stream_interval,
        model=str(options.model),
        pid=os.getpid(),
    )


def _report_end(loop: EngineLoop, channel: Channel) -> None:
    """Waits for the end of the engine, and tells the other process."""
    try:
        loop.wait()
    except BaseException as error:
        channel.send(Failed.of(None, error))
    else:
        channel.send(Failed(None, RuntimeError("the LLM has been closed")))
