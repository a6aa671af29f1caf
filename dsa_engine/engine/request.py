"""A request from its arrival to its output: its tokens, how many of them are in the cache and where, and its text.

A token that has been sampled and not read yet is known to the device alone. Here, and nowhere else, it is a
placeholder: the index at which it lies in the ``tokens`` of the step that samples it (``sampler.Samples``).
:meth:`Request.tokens` gives it as a negative number, which ``batch.known_ids`` replaces on the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dsa_engine.outputs import CompletionOutput, Logprobs, RequestMetrics, SpeculationMetrics, StreamPiece
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.tokenizer import TextStream


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
    arrival: float = 0.0  # seconds, time.perf_counter
    text: TextStream | None = None  # makes text of the output; None: nobody asks for it
    bad_words: list[list[int]] = field(default_factory=list)  # token ids of each word
    output: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)  # of each output token, where they are asked for
    placeholders: list[int] = field(default_factory=list)  # of the tokens not read yet, oldest first; see the module
    uncertain: int = 0  # of the placeholders, those that are no tokens where a draft turns out not to be accepted
    drafts: list[int] = field(default_factory=list)  # guesses of the tokens behind its last one; no part of its length
    verified: list[tuple[int, int]] = field(default_factory=list)  # of each step: its drafts, and the accepted ones
    last_rows: LastRows | None = None  # of its last computed positions, on its owner; with several MTP modules
    num_computed_tokens: int = 0  # tokens whose rows are in the cache, or will be when the steps in flight are done
    num_prefill_tokens: int = field(init=False)  # what prefill computes: the prompt, and the output before a preemption
    preemptions: int = 0  # times that it has lost its pages
    cp_group: int = 0  # the ranks that prefill it
    owner: int = 0  # the rank that decodes it
    pages: list[int] = field(default_factory=list)
    first_token_time: float | None = None  # seconds, time.perf_counter
    last_token_time: float | None = None
    finish_reason: str | None = None  # of its ending
    error: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # of the prompt's tokens so far, where they are asked for
    exception: Exception | None = None  # of a step that it was part of; whoever waits for it is to raise this

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
        """Most tokens of the output; ``Engine.add`` has put a number where the parameters leave it open."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def prefilled(self) -> bool:
        """Whether it has nothing left to prefill: it decodes."""
        return self.num_computed_tokens >= self.num_prefill_tokens

    def tokens(self, start: int, length: int) -> list[int]:
        """Token ids at ``start … start+length-1``, drafts behind the last; ``-1 - index`` for a placeholder."""
        border, end = len(self.prompt), start + length
        known = self.prompt[start:end] + self.output[max(0, start - border) : max(0, end - border)]
        if len(known) == length:
            return known
        border += len(self.output)
        behind = [-1 - index for index in self.placeholders] + self.drafts
        return known + behind[max(0, start - border) : end - border]

    def append(self, sampled: SampledToken, now: float, eos_token_ids: Collection[int]) -> Ending | None:
        """Takes the next token of the output, and decides whether the request ends with it.

        Args:
            sampled: the token, or the error in its place.
            now: seconds, time.perf_counter.
            eos_token_ids: the model's end-of-sequence tokens.

        Returns:
            how the request ends; None if it goes on. Text that cannot be made ends it, before any other reason.
        """
        if sampled.error is None:
            self.output.append(sampled.token)
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
            if sampled.logprobs is not None:
                self.logprobs.append(sampled.logprobs)
        stop_token = self._stop_token(sampled, eos_token_ids)
        try:
            if sampled.logprobs is not None and self.text is not None:
                self.logprobs[-1] = self.text.decoded(sampled.logprobs)
            ends_unseen = stop_token is not None and not self.params.include_stop_str_in_output
            if sampled.error is None and self.text is not None and not ends_unseen:
                self.text.add(sampled.token)
            ending = self._ending(sampled, stop_token)
            if ending is not None and self.text is not None:
                self.text.finish()
        except Exception as error:  # of the tokenizer: this request's alone
            return Ending("error", f"its tokens could not be decoded to text: {type(error).__name__}: {error}")
        return ending

    def add_prompt_logprobs(self, found: Mapping[int, Logprobs]) -> None:
        """Takes those of the prompt's next tokens, by position."""
        assert self.prompt_logprobs is not None
        for position in sorted(found):
            self.prompt_logprobs[position:] = [found[position]]

    def _stop_token(self, sampled: SampledToken, eos_token_ids: Collection[int]) -> Ending | None:
        """How the request ends if this token, the last of the output, ends it."""
        params = self.params
        if sampled.error is not None or len(self.output) <= params.min_tokens:
            return None
        if sampled.token in eos_token_ids and not params.ignore_eos:
            return Ending("stop")
        if sampled.token in (params.stop_token_ids or ()):
            return Ending("stop", stop_reason=sampled.token)
        return None

    def _ending(self, sampled: SampledToken, stop_token: Ending | None) -> Ending | None:
        if sampled.error is not None:
            return Ending("error", sampled.error)
        if self.text is not None and self.text.stopped:
            return Ending("stop", stop_reason=self.text.stop_string)
        if stop_token is not None:
            return stop_token
        return Ending("length") if len(self.output) >= self.max_tokens else None

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
            if self.uncertain:  # how many tokens are in flight is not known: they are computed again
                self.placeholders, self.uncertain = [], 0
            self.num_prefill_tokens = len(self)

    def piece(self, first: int) -> StreamPiece:
        """The output from token ``first`` on, and the text that has become certain since the last piece."""
        return StreamPiece(
            text=self.text.new_text() if self.text else "",
            token_ids=self.output[first:],
            finish_reason=self.finish_reason,
            error=self.error,
            logprobs=None if self.params.logprobs is None else self.logprobs[first:],
            stop_reason=self.stop_reason,
        )

    def decoded_prompt_logprobs(self) -> list[Logprobs | None] | None:
        """With the text of each token, where text is made."""
        if self.prompt_logprobs is None or self.text is None:
            return self.prompt_logprobs
        return [None if of is None else self.text.decoded(of) for of in self.prompt_logprobs]

    def completion(self, index: int) -> CompletionOutput:
        """The whole output of a request that has ended, as number ``index`` of its prompt; not of one that is
        streamed."""
        assert self.finish_reason is not None
        whole = self.piece(0)
        logprobs = whole.logprobs
        return CompletionOutput(
            index=index,
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=self.finish_reason,
            metrics=RequestMetrics.of(
                self.arrival,
                self.first_token_time,
                self.last_token_time,
                len(self.output),
                self.preemptions,
                SpeculationMetrics.of(self.verified) if self.verified else None,
            ),
            stop_reason=self.stop_reason,
            error=self.error,
            logprobs=logprobs,
            cumulative_logprob=(
                None if logprobs is None else sum(of[token] for of, token in zip(logprobs, self.output, strict=True))
            ),
        )


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … start+length-1`` of a request, computed in one step by ``ranks`` together."""

    request: Request
    start: int
    length: int
    ranks: range
    num_logits: int = -1  # of how many of its last tokens logits are wanted; -1: 1 if it reaches the last token, else 0
    follows: bool = False  # on a step in flight that decides where it starts: at ``start`` if all drafts are accepted

    def __post_init__(self) -> None:
        if self.num_logits < 0:
            object.__setattr__(self, "num_logits", int(self.end == len(self.request)))

    @property
    def end(self) -> int:
        return self.start + self.length
