"""A replica as the simulation sees it: steps that prefill or decode, first come, first served, and a prefix cache."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dsa_engine.router.prefix_map import PrefixMap
from routing_simulation.traffic import BLOCK_TOKENS, Turn


@dataclass(frozen=True)
class ReplicaModel:
    """Rates of a replica.

    Attributes:
        prefill_tokens_per_s: while nothing decodes.
        chunk_tokens: maximum number of tokens of a prefill step.
        decode_step_s: seconds of a decode step, of which ``decode_request_s`` come for each request in it.
        cached_tokens: tokens that the prefix cache holds.
    """

    prefill_tokens_per_s: float = 20_000.0
    chunk_tokens: int = 8192
    decode_step_s: float = 0.025
    decode_request_s: float = 0.0003
    cached_tokens: int = 2_000_000


@dataclass(eq=False)
class Request:
    """A turn at a replica; the times are filled in."""

    turn: Turn
    arrived_s: float
    uncached_tokens: int = 0
    remaining_tokens: int = 0  # in the prefill, then in the output
    hit_tokens: int = 0
    first_token_s: float = 0.0


@dataclass
class Replica:
    """Prefill steps alternate with decode steps while there is work for both, as with ``max_prefill_share`` 0.5."""

    model: ReplicaModel
    busy_s: float = 0.0
    prefilled_tokens: int = 0
    _waiting: deque[Request] = field(default_factory=deque)
    _decoding: list[Request] = field(default_factory=list)
    _decoded_last: bool = True
    _step: tuple[bool, int] = (False, 0)  # is it a prefill; its tokens, or the number of decode steps
    _step_began_s: float = 0.0
    step_ends_s: float | None = None

    def __post_init__(self) -> None:
        self.cache = PrefixMap(self.model.cached_tokens // BLOCK_TOKENS)

    def add(self, request: Request, now: float) -> None:
        """Queues a request. A series of decode steps ends with the one that is running."""
        self._waiting.append(request)
        if self.step_ends_s is None:
            self._begin(now)
        elif not self._step[0]:
            seconds = self._decode_s()
            steps = min(self._step[1], int((now - self._step_began_s) / seconds) + 1)
            self._step = (False, steps)
            self.step_ends_s = self._step_began_s + steps * seconds

    def end_step(self) -> tuple[list[Request], list[Request]]:
        """Ends the step that is running and begins the next: (requests with their first token now, finished ones)."""
        assert self.step_ends_s is not None
        now = self.step_ends_s
        self.busy_s += now - self._step_began_s
        first, finished = [], []
        is_prefill, amount = self._step
        if is_prefill:
            self.prefilled_tokens += amount
            while amount:
                request = self._waiting[0]
                part = min(amount, request.remaining_tokens)
                request.remaining_tokens -= part
                amount -= part
                if not request.remaining_tokens:
                    self._waiting.popleft()
                    request.first_token_s, request.remaining_tokens = now, request.turn.output_tokens
                    self.cache.add(request.turn.blocks)
                    self._decoding.append(request)
                    first.append(request)
        else:
            for request in self._decoding:
                request.remaining_tokens -= amount
            finished = [request for request in self._decoding if request.remaining_tokens <= 0]
            self._decoding = [request for request in self._decoding if request.remaining_tokens > 0]
            for request in finished:
                self.cache.add(request.turn.blocks_after)
        self._decoded_last = not is_prefill
        self.step_ends_s = None
        self._begin(now)
        return first, finished

    def _begin(self, now: float) -> None:
        self._step_began_s = now
        if self._waiting and (self._decoded_last or not self._decoding):
            self._step = (True, self._chunk())
            self.step_ends_s = now + self._step[1] / self.model.prefill_tokens_per_s
        elif self._decoding:
            steps = 1 if self._waiting else min(request.remaining_tokens for request in self._decoding)
            self._step = (False, steps)
            self.step_ends_s = now + steps * self._decode_s()

    def _chunk(self) -> int:
        """Tokens of the next prefill step. Requests find their prefix when they enter it; one whose next block is being
        computed in this step waits for the next."""
        tokens = 0
        entered: list[Request] = []
        for request in self._waiting:
            blocks = request.turn.blocks
            if not request.uncached_tokens:
                matched = self.cache.matched(blocks)
                if any(
                    blocks[matched : matched + 1]
                    and other.turn.blocks[matched : matched + 1] == blocks[matched : matched + 1]
                    for other in entered
                ):
                    break
                request.hit_tokens = min(matched * BLOCK_TOKENS, request.turn.prompt_tokens - 1)
                request.uncached_tokens = request.turn.prompt_tokens - request.hit_tokens
                request.remaining_tokens = request.uncached_tokens
            entered.append(request)
            tokens += request.remaining_tokens
            if tokens >= self.model.chunk_tokens:
                return self.model.chunk_tokens
        return tokens

    def _decode_s(self) -> float:
        return self.model.decode_step_s + self.model.decode_request_s * len(self._decoding)
