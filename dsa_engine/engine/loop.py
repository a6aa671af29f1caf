"""The thread that runs an engine: it takes messages from callers, runs steps, and hands out results.

Every turn has the same order: take messages, schedule, launch, read the previous step (these three: ``Engine.step``),
hand over results. Callers may run in any threads and event loops. They only send messages and wait for their own
results, so an interrupt affects only the caller that waits.

On several ranks each rank has a loop, and all loops run on the messages of rank 0, which reach every rank between the
same two steps. A message that comes during a step travels beside it and takes effect one step later
(``channel.py``). The ranks stay equal as they take the same messages in the same order. Only rank 0 has
callers; what they get may be sent to the other ranks (``spmd.py``).

When there is nothing to do, rank 0 waits for a message, and the other ranks wait for rank 0. It sends an empty message
now and then, so that the death of a rank is noticed.
"""

from __future__ import annotations

import atexit
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress

import torch

from dsa_engine.engine.calls.call import (
    CLOSED,
    Abort,
    CallQueue,
    CallResult,
    Compiled,
    Message,
    PrefillLimit,
    Shutdown,
)
from dsa_engine.engine.calls.channel import MessageChannel
from dsa_engine.engine.calls.jobs import Run, run_job
from dsa_engine.engine.calls.spmd import SpmdCalls
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import Add
from dsa_engine.engine.requests.prefill import PrefillPace
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.samples import StepTokens
from dsa_engine.system.interrupts import ABANDONED

_HEARTBEAT_S = 0.5  # seconds between the messages of ranks that have nothing to do
_CLOSE_S = 30.0  # longest wait for a running step when the loop is closed
_OTHERS_CLOSE_S = 5.0  # how long a rank other than 0 waits for rank 0 to close
_ANSWER_S = 0.5  # time for callers to handle a failure before it ends the process


class EngineLoop:
    """Runs an engine in a new thread, from now until :meth:`close`."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.error: BaseException | None = None  # what ended the loop; None while it runs, and if it was closed
        self.steps = 0
        self.channel = None if engine.mesh.host.alone else MessageChannel(engine.mesh.host)
        self._sends = self.channel is None or self.channel.sends
        several = not engine.mesh.host.alone or engine.mesh.has_counterpart
        self.calls = CallQueue(engine.mesh.is_front or not several)
        self.spmd = SpmdCalls(engine.mesh, self.calls) if several else None
        self._requests: dict[int, Request] = {}  # by id: this loop's requests; a program may have queued others itself
        capacity, tokens = engine.scheduler.capacity, engine.scheduler.max_prefill_tokens
        self._pace = PrefillPace(engine.options.max_tpot, tokens, capacity.page_size * capacity.cp_size)
        self._streams: set[int] = set()  # ids of requests whose callers take tokens as they come
        self._unread = False  # whether a step launched here has not been read
        self._backlog: deque[Add | Run] = deque()  # messages not begun yet; a Run holds up those after it
        self._compiling: dict[int, Add] = {}  # by id: new requests that wait for their grammars
        self._job: Generator[None, None, torch.Tensor] | None = None  # the Run that has begun: the head of the backlog
        self._closing = False  # a message of rank 0 ends all loops
        self._leaving = False  # this rank's loop ends alone, at the exit of its program
        self._ended = threading.Event()
        self.at_end: list[Callable[[], object]] = []  # called in the loop's thread
        self.thread = threading.Thread(target=self._main, name="dsa_engine loop", daemon=True)
        self.thread.start()  # may fail; then nothing of it is left
        # Both run before the mesh's hook, which was registered earlier, and the last one first. The join comes also if
        # the loop has ended: its thread may hold the last reference to the engine, and still be destroying it.
        atexit.register(self.thread.join, _CLOSE_S)
        atexit.register(self._leave)

    # Methods for callers, in any thread.

    def wait(self) -> None:
        """Waits until the loop has ended; raises the error that ended it, if any."""
        while not self._ended.wait(1.0):  # short waits, as not every system interrupts a long one
            pass
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Ends the loop soon (on rank 0, the loops of all ranks) and aborts requests. A destructor may call it."""
        self.calls.closed = True
        if self.calls.here:
            self.calls.put((Shutdown(), None))

    def close(self, wait: bool = True) -> None:
        """Calls :meth:`stop` and waits for the end; without ``wait``, after Ctrl-C, not for a step."""
        self.stop()
        if not wait and self.spmd is None:
            self.thread.name = ABANDONED
        elif threading.current_thread() is not self.thread:
            self.thread.join(_CLOSE_S if self._sends else _OTHERS_CLOSE_S)

    def _leave(self) -> None:
        """Ends the thread at the exit of the program: a thread that runs on could crash the interpreter."""
        self.close()
        if self.thread.is_alive():
            self._leaving = not self._sends
            self.calls.put((Shutdown(), None))
            self.thread.join(4 * _HEARTBEAT_S)

    # Methods of the loop's thread.

    def _main(self) -> None:
        try:
            if self.engine.mesh.device.type == "cuda":
                torch.cuda.set_device(self.engine.mesh.device)  # each thread has its own current device
            while not (self._closing or self._leaving):
                for message in self._receive():
                    self._take(message)
                self._turn()
                if (events := self.engine.scheduler.prefix_cache.events) is not None:
                    events.publish()
        except BaseException as error:
            self.error = error
        finally:
            self._end()

    @property
    def _idle(self) -> bool:
        """Whether there is nothing to compute; the same on all ranks, as all have taken the same messages."""
        return not (self._backlog or self._requests or self._unread)

    def _receive(self) -> list[Message]:
        """The messages that take effect now; waits for some if there is nothing to compute."""
        if self.channel is None:
            return self.calls.take(None if self._idle else 0.0)
        idle, arrived = self._idle, []
        if self.channel.under_way:
            arrived = pickle.loads(self.channel.finish())
        if idle and not arrived:
            self.channel.begin(self._packed(_HEARTBEAT_S))
            arrived = pickle.loads(self.channel.finish())
            if not arrived:
                self.channel.confirm()
        else:
            self.channel.begin(self._packed(0.0))
        return arrived

    def _packed(self, wait_s: float) -> bytes:
        return pickle.dumps(self.calls.take(wait_s)) if self._sends else b""

    def _take(self, message: Message) -> None:
        if isinstance(message, CallResult):
            assert self.spmd is not None  # which makes them
            self.spmd.take(message)
        elif isinstance(message, Shutdown):
            self._closing = True
        elif isinstance(message, Abort):
            self._abort(message.ids)
        elif isinstance(message, PrefillLimit):
            self.engine.scheduler.max_prefill_beside = message.tokens
        elif isinstance(message, Compiled):
            if (add := self._compiling.pop(message.id, None)) is not None:
                self._compile(add)
        elif isinstance(message, Add) and message.params.structured_outputs is not None:
            self._compile(message)
        else:
            self._backlog.append(message)

    def _compile(self, add: Add) -> None:
        """Lets a request begin now or, called again, when its grammar is compiled: no step waits for that."""
        form, grammars = add.params.structured_outputs, self.engine.runner.grammars
        assert form is not None and grammars is not None
        if add.compiled is None:
            add.compiled = grammars.compiled(form.grammar)
            if add.compiled not in grammars.ready:
                self._compiling[add.id] = add
                if self._sends:
                    add.compiled.add_done_callback(lambda _: self.calls.put((Compiled(add.id), None)))
                return
        grammars.ready.add(add.compiled)
        self._backlog.append(add)

    def _abort(self, ids: Sequence[int]) -> None:
        for number in ids:
            self._compiling.pop(number, None)
            if number in self._requests:
                self.engine.finish(self._requests.pop(number), "abort")
        if self._job is not None and self._backlog[0].id in ids:
            self._job.close()
            self._job = None
        if self._backlog:
            self._backlog = deque(one for one in self._backlog if one.id not in ids)

    def _turn(self) -> None:
        while self._backlog and isinstance(add := self._backlog[0], Add):
            self._backlog.popleft()
            self._begin(add)
        if self._job is None and (self._requests or self._unread):
            self._step()
        elif self._backlog and isinstance(run := self._backlog[0], Run):
            self._run(run)
        else:
            return
        self.steps += 1

    def _begin(self, add: Add) -> None:
        request = self._requests[add.id] = self.engine.queue(add)
        reader = self.calls.reader(add.id)
        request.delivery = "nothing" if reader is None else add.delivery
        if reader is not None:
            reader.begun(request)
            if add.delivery == "tokens":
                self._streams.add(add.id)

    def _step(self) -> None:
        self._pace.begin(time.monotonic())
        try:
            sampled = self.engine.step()
        except BaseException as error:
            if self.spmd is not None:
                raise  # the other ranks are in the middle of the step
            failed = [request for request in self._requests.values() if request.exception is error]
            if not failed:
                raise
            for request in failed:
                del self._requests[request.id]
                self.calls.fail(request.id, error)
            return
        finally:
            self._unread = self.engine.in_flight
        if sampled and self._sends:
            self._limit_prefill()
        self._hand_over(sampled)
        if self._idle:
            self._pace.pause()

    def _limit_prefill(self) -> None:
        """Tells all ranks when the length of prefill steps is to change: it is limited while streams decode."""
        self._pace.read(time.monotonic(), self.engine.longest_prefill)
        self._streams &= self._requests.keys()
        scheduler = self.engine.scheduler
        limit = self._pace.limit if self._streams else scheduler.max_prefill_tokens
        if limit != scheduler.max_prefill_beside:
            self.calls.put((PrefillLimit(limit), None))

    def _hand_over(self, sampled: Sequence[StepTokens]) -> None:
        for step in sampled:
            for one in step.ended:
                self._requests.pop(one.id, None)
            self.calls.answer(step)

    def _run(self, run: Run) -> None:
        """Begins or continues a job, which has the engine for itself."""
        try:
            if self._job is None:
                self._job = run_job(self.engine, run)
            next(self._job)
            return
        except StopIteration as end:
            result = end.value
        except BaseException as error:
            if self.spmd is not None:
                raise
            result = error
        self._job = None
        self._backlog.popleft()
        self.calls.last(run.id, result)
        if self.spmd is not None and run.call is not None:
            self.spmd.take(CallResult(run.call, result))

    def _end(self) -> None:
        """Aborts all requests and answers all callers that wait.

        If only rank 0 calls, an error then ends its process here: perhaps none of the callers raises it.
        """
        with suppress(BaseException):
            if self._job is not None:
                self._job.close()
            for request in self._requests.values():
                self.engine.finish(request, "abort")
            # Ranks add their loads only if all end here together.
            if self.engine.recorder is not None and (self._closing or self.channel is None):
                self.engine.recorder.write()
        with suppress(BaseException):
            if self.engine.cache_steps is not None:
                self.engine.cache_steps.close()
            if (events := self.engine.scheduler.prefix_cache.events) is not None:
                events.close()
        self._ended.set()
        for call in list(self.at_end):
            with suppress(Exception):
                call()
        atexit.unregister(self._leave)
        refusal = self.error or RuntimeError(CLOSED)
        self.calls.end(refusal)
        if self.spmd is not None:
            self.spmd.end(refusal)
            with suppress(Exception):  # the store may be gone
                if self.error is not None and self.spmd.all_follow:
                    time.sleep(_ANSWER_S)
                    sys.excepthook(type(self.error), self.error, self.error.__traceback__)
