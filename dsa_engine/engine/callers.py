"""The callers of one rank: their messages on the way to the loop, and the receivers of their results.

Callers and the loop share no lock of Python: an interrupted caller could leave it locked.
"""

from __future__ import annotations

import queue
from collections.abc import Sequence
from contextlib import suppress
from queue import SimpleQueue

from dsa_engine.engine.mailbox import Mailbox
from dsa_engine.engine.reply import Receiver
from dsa_engine.engine.requests.messages import Abort, Message, Run, Shutdown
from dsa_engine.engine.requests.request import Ending, SampledToken

Sent = tuple[Message, Receiver | Mailbox | None]  # a message and the receiver of its results


class Callers:
    """See the module.

    Args:
        leads: whether this rank's messages take effect. On other ranks they only register their receivers, as the
            messages that take effect are rank 0's.

    Attributes:
        leaving: whether a message has ended the loop of this rank alone, which does not lead.
    """

    def __init__(self, leads: bool):
        self._leads = leads
        self.leaving = False
        self._inbox: SimpleQueue[tuple[Sent, ...]] = SimpleQueue()
        self._replies: dict[int, Receiver] = {}  # by id: requests whose caller waits on this rank
        self._jobs: dict[int, Mailbox] = {}  # by id: jobs whose caller waits on this rank

    def put(self, *messages: Sent) -> None:
        """Sends messages to the loop, from any thread; it cannot fail."""
        self._inbox.put(messages)

    # Methods of the loop's thread.

    def take(self, wait_s: float | None) -> list[Message]:
        """Takes the messages that are there, and registers the receivers of their results.

        Args:
            wait_s: longest wait for the first message; None: no limit. A rank that does not lead never waits.

        Returns:
            the messages on the rank that leads; none on others.
        """
        messages: list[Message] = []
        with suppress(queue.Empty):
            while True:
                wait = 0.0 if messages or not self._leads else wait_s
                for message, results in self._inbox.get(wait != 0.0, wait):
                    self._note(message, results)
                    messages.append(message)
        return messages if self._leads else []

    def _note(self, message: Message, results: Receiver | Mailbox | None) -> None:
        """Registers the receiver of a message's results, or removes it."""
        if isinstance(results, Receiver):
            self._replies[results.add.id] = results
        elif isinstance(message, Run) and results is not None:
            self._jobs[message.id] = results
        elif isinstance(message, Abort):
            for number in message.ids:
                self._replies.pop(number, None)
                self._jobs.pop(number, None)
        elif isinstance(message, Shutdown) and not self._leads:
            self.leaving = True

    def reply(self, number: int) -> Receiver | None:
        """The receiver of a request's results; None if no caller waits for them here."""
        return self._replies.get(number)

    def answer(self, number: int, tokens: Sequence[SampledToken], ending: Ending | None) -> None:
        """Gives a caller the new tokens of a request, and ends the request if its text has reached a stop string."""
        reply = self._replies.get(number)
        if reply is None:
            return
        reply.take(tokens, ending)
        if reply.ending is not None:
            self._replies.pop(number, None)
            if ending is None and self._leads:
                self.put((Abort((number,)), None))
        reply.hand_over()

    def answer_job(self, number: int, result: object) -> None:
        """Gives a caller the result of a job, or its error."""
        if number in self._jobs:
            self._jobs.pop(number).put(result)

    def fail(self, number: int, error: BaseException) -> None:
        """Ends a request or a job for its caller, if one waits here."""
        reply = self._replies.pop(number, None)
        if reply is not None:
            reply.mailbox.put(error)
        self.answer_job(number, error)

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests and jobs for their callers, and those of messages that have not been taken."""
        for mailbox in [reply.mailbox for reply in list(self._replies.values())] + list(self._jobs.values()):
            mailbox.put(error)
        self.refuse(error)

    def refuse(self, error: BaseException) -> None:
        """Answers the messages that have not been taken; any thread may call it."""
        with suppress(queue.Empty):
            while True:
                for _, results in self._inbox.get_nowait():
                    if results is not None:
                        (results.mailbox if isinstance(results, Receiver) else results).put(error)
