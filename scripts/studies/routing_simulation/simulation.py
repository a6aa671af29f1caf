"""Runs traffic through replicas behind a rule, event by event, and sums up what users and replicas got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Any

from dsa_engine.router.rule import Sent
from routing_simulation.replicas import Replica, ReplicaModel, Request
from routing_simulation.routers import Router
from routing_simulation.traffic import Conversation

SHORT_TOKENS = 8192  # a prompt of fewer tokens is short


@dataclass(frozen=True)
class Summary:
    """What a rule makes of the traffic.

    Attributes:
        requests: their number.
        hit_rate: cached tokens of all prompt tokens.
        ttft_short, ttft_long: p50 and p99 of the seconds to the first token, by the prompt's length.
        imbalance: busy seconds of the busiest replica, over the mean of all.
        busy: busy fraction of all replicas, from the first arrival to the last end.
    """

    requests: int
    hit_rate: float
    ttft_short: tuple[float, float]
    ttft_long: tuple[float, float]
    imbalance: float
    busy: float

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        for name in ("ttft_short", "ttft_long"):
            p50, p99 = values.pop(name)
            values |= {f"{name}_p50_s": p50, f"{name}_p99_s": p99}
        return values


def simulate(conversations: Sequence[Conversation], router: Router, replicas: int, model: ReplicaModel) -> Summary:
    """Runs all conversations to their end."""
    fleet = [Replica(model) for _ in range(replicas)]
    # (time, number, what): a turn of a conversation that arrives, or a replica whose step may have ended.
    events: list[tuple[float, int, tuple[Conversation, int] | int]] = []
    sent: dict[Request, tuple[Sent, Conversation, int]] = {}
    done: list[Request] = []
    numbers = iter(range(1 << 62))
    for conversation in conversations:
        if conversation.turns:
            heappush(events, (conversation.start_s, next(numbers), (conversation, 0)))
    began = events[0][0] if events else 0.0
    now = began
    while events:
        now, _, what = heappop(events)
        if isinstance(what, int):
            replica = fleet[what]
            if replica.step_ends_s != now:  # the step was shortened
                continue
            first, finished = replica.end_step()
            for request in first:
                router.first_token(sent[request][0])
            for request in finished:
                ticket, conversation, turn = sent.pop(request)
                router.finished(ticket)
                done.append(request)
                if turn + 1 < len(conversation.turns):
                    later = now + conversation.turns[turn + 1].think_s
                    heappush(events, (later, next(numbers), (conversation, turn + 1)))
            number = what
        else:
            conversation, turn = what
            ticket = router.send(conversation.turns[turn])
            request = Request(conversation.turns[turn], now)
            sent[request] = (ticket, conversation, turn)
            number = ticket.replica
            fleet[number].add(request, now)
        ends_s = fleet[number].step_ends_s
        if ends_s is not None:
            heappush(events, (ends_s, next(numbers), number))
    return _summary(done, fleet, now - began)


def _summary(done: Sequence[Request], fleet: Sequence[Replica], seconds: float) -> Summary:
    short: list[float] = []
    long: list[float] = []
    for request in done:
        ttft = request.first_token_s - request.arrived_s
        (short if request.turn.prompt_tokens < SHORT_TOKENS else long).append(ttft)
    busy = [replica.busy_s for replica in fleet]
    mean = sum(busy) / len(busy)
    return Summary(
        requests=len(done),
        hit_rate=sum(request.hit_tokens for request in done) / sum(request.turn.prompt_tokens for request in done),
        ttft_short=(_percentile(short, 0.5), _percentile(short, 0.99)),
        ttft_long=(_percentile(long, 0.5), _percentile(long, 0.99)),
        imbalance=max(busy) / mean,
        busy=mean / seconds,
    )


def _percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else 0.0
