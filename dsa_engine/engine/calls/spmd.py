"""The same calls on every rank of a run: rank 0 makes them, and the other ranks get their results.

The k-th call of another rank, made by the thread that made its engine, gets the results of the k-th call that this
thread has begun on rank 0: what it returns, the pieces of a stream as they come, or its error. Rank 0 waits for no
other rank. It sends results until all others follow; those of its other threads and of requests over HTTP stay there.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from itertools import count
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from dsa_engine.engine.calls.call import CLOSED, CallQueue, CallResult
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.agreement import store_of_run

T = TypeVar("T")
_END = None  # the last result of a call; all others are bytes, tensors or exceptions
_engines: Counter[str] = Counter()  # engines of this process, by their ranks


class SpmdCalls:
    """See the module; made in the thread that makes the engine."""

    def __init__(self, mesh: Mesh, calls: CallQueue):
        self._mesh, self._calls = mesh, calls
        # With prefill_ranks, results would not reach the ranks that decode: all but rank 0 must follow.
        self._all_follow = mesh.has_counterpart
        self._follows = False
        self._thread = threading.get_ident()
        self._numbers = count()  # given to the calls of `_thread`
        self._results: dict[int, SimpleQueue[Any]] = {}  # by call: those that have come from rank 0
        self._refusal: BaseException | None = None  # why no more results come
        ranks = str(mesh.run_ranks)
        _engines[ranks] += 1
        self._followers = f"followers of engine {_engines[ranks]} of {ranks}"  # their number, in the run's store

    def check(self) -> None:
        """Raises ``RuntimeError`` if this thread cannot call on this rank, or what :meth:`.CallQueue.check` raises."""
        if self._calls.here:
            self._calls.check()
        elif self._calls.closed:
            raise RuntimeError(CLOSED)
        elif self._mesh.has_counterpart or self._follows or self._thread != threading.get_ident():
            raise RuntimeError(
                f"rank {self._mesh.run_rank} makes the calls of rank 0 only without prefill_ranks, in the thread that "
                "made the LLM, and as long as it does not follow(); let it follow(), and call on rank 0"
            )

    def result(self, work: Callable[[int | None], T]) -> T:
        """What a call returns; for ``work`` see :meth:`pieces`."""

        def once(number: int | None) -> Generator[T, None, None]:
            yield work(number)

        (result,) = self.pieces(once)
        return result

    def pieces(self, work: Callable[[int | None], Generator[T, None, None]]) -> Generator[T, None, None]:
        """The pieces of a stream, or the one result of another call, which begins with the first one. ``work``: makes
        the call on rank 0; gets its number, or None if no other rank wants its results."""
        self.check()
        if not self._calls.here:
            number = next(self._numbers)
            while (piece := self._next_result(number)) is not _END:
                yield piece
            return
        wanted = self._thread == threading.get_ident() and not self.all_follow
        sent_as = next(self._numbers) if wanted else None
        try:
            with closing(work(sent_as)) as pieces:
                for piece in pieces:
                    self._send(sent_as, piece)
                    yield piece
        except BaseException as error:
            self._send(sent_as, _sendable(error))
            raise
        self._send(sent_as, _END)

    def _send(self, number: int | None, result: object) -> None:
        # A tensor is the result of a job, which every rank has computed. Others are pickled before they may change.
        if number is not None and not isinstance(result, torch.Tensor):
            self._calls.put((CallResult(number, pickle.dumps(result)), None))

    def _next_result(self, number: int) -> Any:
        results = self._results.setdefault(number, SimpleQueue())
        if self._refusal is not None:
            results.put(self._refusal)  # after those that have come
        result = results.get()
        result = pickle.loads(result) if isinstance(result, bytes) else result
        if result is _END or isinstance(result, BaseException):
            self._results.pop(number, None)
        if isinstance(result, BaseException):
            raise result
        return result

    def follow(self) -> None:
        """Tells rank 0 that this rank makes no more calls."""
        if not (self._all_follow or self._follows):
            store_of_run().add(self._followers, 1)
        self._follows = True
        self._results.clear()

    @property
    def all_follow(self) -> bool:
        """Whether this is rank 0 and no other rank calls."""
        if self._calls.here and not self._all_follow:
            self._all_follow = store_of_run().add(self._followers, 0) == self._mesh.world_size - 1
        return self._calls.here and self._all_follow

    # Methods of the loop's thread.

    def take(self, result: CallResult) -> None:
        """Keeps a result for the caller of this rank."""
        if not (self._calls.here or self._follows):
            self._results.setdefault(result.number, SimpleQueue()).put(result.result)

    def end(self, refusal: BaseException) -> None:
        self._refusal = refusal
        for results in list(self._results.values()):
            results.put(refusal)


def _sendable(error: BaseException) -> BaseException:
    """An error as other ranks get it: another one if it cannot be sent, or if it is an interrupt of rank 0 alone."""
    if isinstance(error, Exception):
        with suppress(Exception):
            pickle.loads(pickle.dumps(error))
            return error
    return RuntimeError(f"rank 0 has left this call before its end: {type(error).__name__}: {error}")
