"""A request from its arrival to its output: its tokens, and how many of them are in the cache and where.

A token that has been sampled and not read yet is known to the device alone. Here, and nowhere else, it is a
placeholder: the index at which it lies in the ``tokens`` of the step that samples it (``sampler.StepResult``).
:meth:`Request.tokens` gives it as a negative number, which ``batch.known_ids`` replaces on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsa_engine.outputs import Logprobs
from dsa_engine.sampling_params import SamplingParams


class SampledToken(NamedTuple):
    """What was sampled from one row of logits."""

    token: int
    logprobs: Logprobs | None = None  # None if not asked for
    error: str | None = None  # why there is no token; the request ends with it


class Ending(NamedTuple):
    """How a request ends."""

    reason: str  # "stop", "length", "abort" or "error"
    error: str | None = None  # what went wrong, with "error"
    stop_reason: int | str | None = None  # the stop token or stop string, with "stop"


class LastRows(NamedTuple):
    """What is kept of a request's last computed positions, one less than there are MTP modules: on the device."""

    states: torch.Tensor  # [modules - 1, hidden], of the model
    tokens: torch.Tensor  # [modules - 1] int64


@dataclass(eq=False)
class Request:
    """One request.

    ``id`` grows with the order of arrival. ``pages`` are this rank's own; other ranks hold the same request in other
    pages or not at all. Its length counts placeholders; ``output`` lacks them.
    """

    id: int
    prompt: list[int]
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)  # token ids of each word
    output: list[int] = field(default_factory=list)
    placeholders: list[int] = field(default_factory=list)  # of the tokens not read yet, oldest first; see the module
    num_unverified: int = 0  # of the placeholders, those that are no tokens where a draft turns out not to be accepted
    drafts: list[int] = field(default_factory=list)  # guesses of the tokens behind its last one; no part of its length
    draft_stats: list[tuple[int, int]] = field(default_factory=list)  # of each step: its drafts, and the accepted ones
    last_rows: LastRows | None = None  # of its last computed positions, on its owner; with several MTP modules
    num_computed_tokens: int = 0  # tokens whose rows are in the cache, or will be when the steps in flight are done
    num_prefill_tokens: int = field(init=False)  # what prefill computes: the prompt, and the output before a preemption
    preemptions: int = 0  # times that it has lost its pages
    cp_group: int = 0  # the ranks that prefill it
    owner: int = 0  # the rank that decodes it
    pages: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # of its ending
    error: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # of the prompt's tokens so far, where they are asked for
    exception: BaseException | None = None  # of a step that it was part of, for its caller to raise

    def __post_init__(self) -> None:
        self.num_prefill_tokens = len(self.prompt)
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing stands before the first token

    def __len__(self) -> int:
        return len(self.prompt) + self.num_output_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the output, placeholders included."""
        return len(self.output) + len(self.placeholders)

    @property
    def max_tokens(self) -> int:
        """Maximum of the output; a number also where the caller left it open (``new_request.py``)."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def prefilled(self) -> bool:
        """Whether it has nothing left to prefill: it decodes."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def ending(self) -> Ending | None:
        """How it has ended; None while it runs."""
        return None if self.finish_reason is None else Ending(self.finish_reason, self.error, self.stop_reason)

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at ``start … start+length-1``, drafts behind the last; ``-1 - index`` for a placeholder."""
        border, end = len(self.prompt), start + length
        known = self.prompt[start:end] + self.output[max(0, start - border) : max(0, end - border)]
        if len(known) == length:
            return known
        border += len(self.output)
        behind = [-1 - index for index in self.placeholders] + self.drafts
        return known + behind[max(0, start - border) : end - border]

    def append(self, sampled: SampledToken, eos_token_ids: Collection[int]) -> Ending | None:
        """Takes the next token of the output, and decides whether the request ends with it: stop strings, which are
        seen in the text alone, are the caller's side's to find (``reply.py``).

        Args:
            sampled: the token, or the error in its place.
            eos_token_ids: the model's end-of-sequence tokens.

        Returns:
            how the request ends; None if it goes on.
        """
        if sampled.error is not None:
            return Ending("error", sampled.error)
        self.output.append(sampled.token)
        params, count = self.params, len(self.output)
        if count > params.min_tokens:
            if sampled.token in eos_token_ids and not params.ignore_eos:
                return Ending("stop")
            if sampled.token in (params.stop_token_ids or ()):
                return Ending("stop", stop_reason=sampled.token)
        return Ending("length") if count >= self.max_tokens else None

    def add_prompt_logprobs(self, found: Mapping[int, Logprobs]) -> None:
        """Takes those of the prompt's next tokens, by position."""
        assert self.prompt_logprobs is not None
        for position in sorted(found):
            self.prompt_logprobs[position:] = [found[position]]

    def rewind(self, num_computed_tokens: int) -> None:
        """Forgets the cache rows from this position on: the tokens there are computed again.

        From 0 all tokens so far are prefilled, the output too.

        Raises:
            ValueError: so many have not been computed, or a part of what was prefilled would have to be decoded.
        """
        if not 0 <= num_computed_tokens <= self.num_computed_tokens:
            raise ValueError(f"cannot rewind to {num_computed_tokens}: {self.num_computed_tokens} tokens are computed")
        if self.prefilled and 0 < num_computed_tokens < self.num_prefill_tokens:
            raise ValueError(
                f"cannot rewind to {num_computed_tokens}: {self.num_prefill_tokens} tokens were prefilled; "
                "rewind to as many or more, or to 0"
            )
        self.num_computed_tokens = num_computed_tokens
        if num_computed_tokens == 0:
            self.drafts, self.last_rows = [], None
            if self.num_unverified:  # how many tokens are in flight is not known: they are computed again
                self.placeholders, self.num_unverified = [], 0
            self.num_prefill_tokens = len(self)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … start+length-1`` of a request, computed in one step by ``ranks`` together."""

    request: Request
    start: int
    length: int
    ranks: range
    num_logits: int = -1  # of how many of its last tokens logits are wanted; -1: 1 if it reaches the last token, else 0
    starts_on_device: bool = False  # where a step in flight decides: at ``start`` if all of its drafts are accepted

    def __post_init__(self) -> None:
        if self.num_logits < 0:
            object.__setattr__(self, "num_logits", int(self.end == len(self.request)))

    @property
    def end(self) -> int:
        return self.start + self.length
