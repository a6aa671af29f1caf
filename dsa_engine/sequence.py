"""A request on its way: its tokens, how many of them are in the cache, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsa_engine.sampling import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One request.

    ``pages`` are this rank's own; other ranks hold the same sequence in other pages or not at all.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # seconds, time.perf_counter
    output: list[int] = field(default_factory=list)
    computed: int = 0  # tokens whose rows are in the cache
    cp_group: int = 0  # the ranks that prefill it
    owner: int = 0  # the rank that decodes it
    pages: list[int] = field(default_factory=list)
    first_token: float | None = None  # seconds, time.perf_counter
    last_token: float | None = None
    finish_reason: str | None = None  # "stop" or "length"

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def prefilled(self) -> bool:
        return self.computed >= len(self.prompt)

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at ``start … start+length-1``."""
        border = len(self.prompt)
        if start + length <= border:
            return self.prompt[start : start + length]
        if start >= border:
            return self.output[start - border : start - border + length]
        return self.prompt[start:] + self.output[: start + length - border]


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … start+length-1`` of a sequence, computed in one step by ``ranks`` together."""

    sequence: Sequence
    start: int
    length: int
    ranks: range

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """Whether a token is sampled after it."""
        return self.end == len(self.sequence)
