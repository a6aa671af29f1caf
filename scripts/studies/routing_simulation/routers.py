"""The rules under comparison: round robin, least requests, and the router's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dsa_engine.router.rule import Prompt, Rule, Sent
from routing_simulation.traffic import BLOCK_TOKENS, Turn


class Router(Protocol):
    """Chooses a replica for each request, and hears of its first token and its end."""

    def send(self, turn: Turn) -> Sent: ...

    def first_token(self, sent: Sent) -> None: ...

    def finished(self, sent: Sent) -> None: ...


class OurRule:
    def __init__(self, replicas: int, cached_tokens: int):
        self._replicas = range(replicas)
        self._rule = Rule(replicas, cached_tokens=cached_tokens, block_tokens=BLOCK_TOKENS)

    def send(self, turn: Turn) -> Sent:
        prompt = self.prompt(turn)
        return self._rule.send(prompt, self.choose(prompt))

    def prompt(self, turn: Turn) -> Prompt:
        return Prompt(turn.prompt_tokens, turn.blocks)

    def choose(self, prompt: Prompt) -> int:
        return self._rule.choose(prompt, self._replicas)

    def first_token(self, sent: Sent) -> None:
        self._rule.first_byte(sent)

    def finished(self, sent: Sent) -> None:
        self._rule.end(sent)


class LeastRequests(OurRule):
    """The replica with the fewest requests; the first of them on a tie."""

    def prompt(self, turn: Turn) -> Prompt:
        return Prompt(turn.prompt_tokens)

    def choose(self, prompt: Prompt) -> int:
        return min(self._replicas, key=self._rule.requests)


class RoundRobin(LeastRequests):
    def __init__(self, replicas: int, cached_tokens: int):
        super().__init__(replicas, cached_tokens)
        self._next = -1

    def choose(self, prompt: Prompt) -> int:
        self._next = (self._next + 1) % len(self._replicas)
        return self._next


ROUTERS: dict[str, Callable[[int, int], Router]] = {
    "round robin": RoundRobin,
    "least requests": LeastRequests,
    "ours": OurRule,
}
