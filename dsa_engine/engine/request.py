"""A request on its way: its tokens, how many of them are in the cache, and where."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsa_engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Request:
    """One request.

    ``id`` grows with the order of arrival. ``pages`` are this rank's own; other ranks hold the same request in other
    pages or not at all. Its length counts the tokens that have been sampled and not read yet; ``output`` lacks these.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    arrival: float = 0.0  # seconds, time.perf_counter
    output: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)  # of each output token, where they are asked for
    unread: int = 0  # tokens that steps under way sample
    place: int = 0  # of the last of these, in the tokens that its step samples
    num_computed_tokens: int = 0  # tokens whose rows are in the cache, or will be when the steps under way are done
    to_prefill: int = field(init=False)  # tokens that prefill computes: the prompt, and the output before a preemption
    preemptions: int = 0  # times that it has lost its pages
    cp_group: int = 0  # the ranks that prefill it
    owner: int = 0  # the rank that decodes it
    pages: list[int] = field(default_factory=list)
    first_token: float | None = None  # seconds, time.perf_counter
    last_token: float | None = None
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    error: str | None = None  # what ended it, with "error"

    def __post_init__(self) -> None:
        self.to_prefill = len(self.prompt)

    def __len__(self) -> int:
        return len(self.prompt) + self.generated

    @property
    def generated(self) -> int:
        """Tokens of the output, those that have not been read yet included."""
        return len(self.output) + self.unread

    @property
    def prefilled(self) -> bool:
        """Whether it has nothing left to prefill: it decodes."""
        return self.num_computed_tokens >= self.to_prefill

    def restart(self) -> None:
        """Forgets what is in the cache: all tokens so far, the sampled ones too, are to be prefilled again."""
        self.num_computed_tokens, self.to_prefill = 0, len(self)
        self.preemptions += 1

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at ``start … start+length-1``; in place of a last one that has not been read, ``-1 - place``."""
        border, end = len(self.prompt), start + length
        known = self.prompt[start:end] + self.output[max(0, start - border) : max(0, end - border)]
        return known if len(known) == length else [*known, -1 - self.place]


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … start+length-1`` of a request, computed in one step by ``ranks`` together."""

    request: Request
    start: int
    length: int
    ranks: range
    num_logits: int = -1  # of how many of its last tokens logits are wanted; -1: 1 if it reaches the last token, else 0

    def __post_init__(self) -> None:
        if self.num_logits < 0:
            object.__setattr__(self, "num_logits", int(self.end == len(self.request)))

    @property
    def end(self) -> int:
        return self.start + self.length
