"""Both sides of a run that has P/D disaggregation, in one process and in random order: the loops and schedulers are
real; steps, transfers and the line between the sides are not, and every row says what it holds."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, cast

import torch

from dsa_engine.engine.cache.link import RankPages
from dsa_engine.engine.cache.steps import CacheSteps
from dsa_engine.engine.calls.call import Abort
from dsa_engine.engine.calls.reply import Failure, Reader
from dsa_engine.engine.disaggregation.decode_loop import DecodeLoop
from dsa_engine.engine.disaggregation.prefill_loop import PrefillLoop
from dsa_engine.engine.disaggregation.schedulers import DecodeScheduler, PrefillScheduler
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import Add, Capacity
from dsa_engine.engine.requests.request import Ending, Request
from dsa_engine.engine.requests.samples import Samples, StepResult, StepTokens
from dsa_engine.engine.requests.scheduler import Step
from dsa_engine.sampling_params import SamplingParams

SIZE, EOS, STOP = 4, 5, 9  # tokens of a page; a stop token; a token whose text is a stop string


def token(number: int, index: int) -> int:
    """The output token of a request at an index."""
    return 5 + (number * 7919 + index * index * 31) % 40


def row(request: Request, position: int) -> int:
    """What a request's cache row holds: it depends on all tokens so far."""
    known = len(request.prompt)
    tokens = [*request.prompt, *(token(request.id, index) for index in range(position + 1 - known))]
    return hash(tuple(tokens[: position + 1]))


class Rows(dict[tuple[int, int], int]):
    """The cache of one rank, by page and offset."""

    def write(self, request: Request, start: int, end: int) -> None:
        for at in range(start, end):
            self[request.pages[at // SIZE], at % SIZE] = row(request, at)

    def check(self, request: Request, end: int) -> None:
        for at in range(end):
            assert self[request.pages[at // SIZE], at % SIZE] == row(request, at), (request.id, at)


class Steps:
    """A runner whose steps write rows, and sample :func:`token`."""

    def __init__(self, rows: Rows):
        self._rows, self.num_drafts = rows, 0

    def plan(self, step: Step) -> Any:
        return SimpleNamespace(chunks=step.chunks, for_graph=False, rows_by_form=lambda config: None)

    def runs_ahead(self, plan: Any, before: StepResult) -> bool:
        return bool(plan.chunks)

    def launch(self, plan: Any, before: StepResult | None) -> StepResult:
        requests = [chunk.request for chunk in plan.chunks if chunk.num_logits]
        for chunk in plan.chunks:
            self._rows.check(chunk.request, chunk.start)
            self._rows.write(chunk.request, chunk.start, chunk.end)
        codes = torch.tensor([token(one.id, len(one) - len(one.prompt)) for one in requests], dtype=torch.int64)
        return StepResult(Samples.of(requests, [0] * len(codes), [1] * len(codes), 1), codes, lambda: codes)


class Link:
    """Pages from one rank to another: each in the order of both sides, and at any time after its step."""

    def __init__(self, source: Rows, target: Rows):
        self.sends, self.receives = deque[RankPages](), deque[RankPages]()
        self._rows = source, target
        self.unfinished: list[RankPages] = []
        self.ended: list[RankPages] = []

    def move(self) -> None:
        sent, received = self.sends.popleft(), self.receives.popleft()
        assert (sent.id, len(sent.pages)) == (received.id, len(received.pages))
        source, target = self._rows
        for page, into in zip(sent.pages, received.pages, strict=True):
            target |= {(into, at): source[page, at] for at in range(SIZE) if (page, at) in source}
        self.ended.append(received)


class Sender:
    def __init__(self, link: Link):
        self._link = link

    def begin(self, sends: Iterable[RankPages]) -> None:
        self._link.unfinished = [send for send in sends if send.pages]

    def finish(self) -> None:
        self._link.sends += self._link.unfinished
        self._link.unfinished = []

    def poll(self) -> None: ...


class Side:
    """One side with one rank: its loop, driven by hand."""

    def __init__(self, loop: type[PrefillLoop] | type[DecodeLoop], pages: int, rows: Rows, **transport: Any):
        prefills = loop is PrefillLoop
        engine: Any = object.__new__(Engine)
        self.engine = engine
        host = SimpleNamespace(alone=True)
        engine.mesh = SimpleNamespace(
            host=host, rank=0, global_ranks=[int(not prefills)], is_front=prefills, has_counterpart=True,
            cp_ranks=lambda group: range(1), device=torch.device("cpu"), world_size=1, run_ranks=[0, 1],
        )  # fmt: skip
        capacity = Capacity(1, 1, pages, SIZE)
        limits: dict[str, Any] = {"rank": 0, "max_num_seqs": 6, "max_num_batched_tokens": 4, "max_prefill_share": 1.0}
        engine.scheduler = (PrefillScheduler if prefills else DecodeScheduler)(capacity, **limits)
        engine.options = SimpleNamespace(seed=0, max_tpot=None)
        engine.cache = SimpleNamespace(page_size=SIZE, pages=pages)
        engine.cache_steps = CacheSteps(engine.scheduler, engine.mesh, sender=transport.get("sender"))
        engine.runner, engine.config = Steps(rows), SimpleNamespace(eos_token_ids={EOS})
        engine.async_scheduling, engine._in_flight = not prefills, None
        engine.recorder = engine.rebalancing = None
        engine.after_launch = ()
        engine.num_prefilled_tokens = engine.longest_prefill = engine._num_taken = engine.launched_ahead = 0
        engine.counted_tokens, engine.steps_by_tokens = 0, [0] * 32
        side: Any = SimpleNamespace(
            prefills=prefills, sender=transport.get("sender"), receiver=transport.get("receiver")
        )
        self.loop = cast(Any, loop(engine, side))
        self.outgoing = deque[Any]()
        self.loop._line = SimpleNamespace(send=self.outgoing.append)

    @property
    def ready(self) -> bool:
        """Whether the loop would not wait."""
        return not self.loop._idle or not self.loop.calls._messages.empty()

    def turn(self) -> None:
        for message in self.loop.calls.take(0.0):
            self.loop._take(message)
        self.loop._turn()


class Caller(Reader):
    """Gets the tokens of a request, and leaves it after some of them, or at the stop string."""

    def __init__(self, add: Add, rng: random.Random, abort: Callable[[list[int]], None]):
        self.add, self._abort = add, abort
        self.ending: Ending | None = None
        self.tokens: list[int] = []
        self.leaves = rng.random() < 0.4  # at any time
        self.stops = rng.random() < 0.5

    def begun(self, request: Request) -> None:
        assert request.id == self.add.id

    def put(self, item: StepTokens | Failure, /) -> None:
        assert isinstance(item, StepTokens)
        if self.ending is not None:
            return  # tokens after a stop string
        of_step = [(tokens[:count], None) for tokens, count in zip(item.tokens.tolist(), item.counts.tolist())]
        for tokens, ending in [*of_step, *((one.tokens, one.ending) for one in item.ended)]:
            for number, one in enumerate(tokens):
                self.tokens.append(one)
                self.ending = ending if number == len(tokens) - 1 else None
                if self.stops and one == STOP:
                    self.ending = Ending("stop", stop_reason="stop string")
                    self._abort([self.add.id])
                    return

    def check(self) -> None:
        wanted = [token(self.add.id, index) for index in range(len(self.tokens))]
        assert self.tokens == wanted
        if self.ending is not None:
            last, limit = self.tokens[-1], self.add.params.max_tokens
            assert last == EOS or (self.stops and last == STOP) or len(self.tokens) == limit
            assert EOS not in self.tokens[:-1] and not (self.stops and STOP in self.tokens[:-1])


class Simulation:
    def __init__(self, seed: int, prefill_pages: int, decode_pages: int):
        self.rng = random.Random(seed)
        mine, other = Rows(), Rows()
        self.link = link = Link(mine, other)

        def poll() -> list[RankPages]:
            ended, link.ended = link.ended, []
            return ended

        def post(receives: Iterable[RankPages]) -> None:
            link.receives += [one for one in receives if one.pages]
            link.ended += [one for one in receives if not one.pages]

        self.prefill = Side(PrefillLoop, prefill_pages, mine, sender=Sender(link))
        self.decode = Side(DecodeLoop, decode_pages, other, receiver=SimpleNamespace(poll=poll, post=post))
        self.callers: list[Caller] = []
        self.said: list[Any] = []  # messages that have been delivered

    def call(self, prompt: list[int], max_tokens: int) -> Caller:
        add = Add(prompt, SamplingParams(max_tokens=max_tokens), id=len(self.callers))
        self.callers.append(Caller(add, self.rng, self.prefill.loop.calls.abort))
        self.prefill.loop.calls.put((add, self.callers[-1]))
        return self.callers[-1]

    def abort(self, caller: Caller) -> None:
        self.prefill.loop.calls.put((Abort((caller.add.id,)), None))
        caller.leaves = False

    def deliver(self, source: Side, target: Side) -> None:
        messages = [source.outgoing.popleft() for _ in range(self.rng.randint(1, len(source.outgoing)))]
        self.said += messages
        for message in messages:
            target.loop._delivered(message)

    def events(self) -> list[Callable[[], None]]:
        """What may happen now."""
        prefill, decode = self.prefill, self.decode
        events = [side.turn for side in (prefill, decode) if side.ready]
        for source, target in ((prefill, decode), (decode, prefill)):
            if source.outgoing:
                events.append(lambda source=source, target=target: self.deliver(source, target))  # type: ignore[misc]
        if self.link.sends and self.link.receives:
            events.append(self.link.move)
        return events

    def step(self) -> bool:
        """Lets one of the events happen, and now and then a caller leave; False if nothing can happen."""
        leaving = [caller for caller in self.callers if caller.leaves and caller.ending is None]
        if leaving and self.rng.random() < 0.03:
            self.abort(self.rng.choice(leaving))
        events = self.events()
        if events:
            self.rng.choice(events)()
        return bool(events)

    def run(self) -> None:
        """Runs until nothing can happen; a loop that polls counts as one that waits while pages are under way."""
        for _ in range(20_000):
            if not self.step():
                return
        raise AssertionError("it does not end")

    def check_end(self) -> None:
        for caller in self.callers:
            caller.check()
            assert caller.ending is not None or self.prefill.loop.calls.reader(caller.add.id) is None
        for side in (self.prefill, self.decode):
            loop, scheduler = side.loop, side.engine.scheduler
            assert scheduler.free_pages == [side.engine.cache.pages] and not scheduler.has_work
            for name in ("_requests", "_journeys", "_arrivals"):
                assert not getattr(loop, name, None), name
            for name in ("sending", "away"):
                assert not getattr(scheduler, name, None), name
