"""What a request may ask: the size of the caches, and the message of a new request, checked against it and copied."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

from dsa_engine.engine.requests.request import PageDigests, Request
from dsa_engine.errors import CapacityError, ContextLengthError
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.sampling_params import HAS_BUDGET, SamplingParams, StructuredOutputsParams
from dsa_engine.text.tokenizer import THINKING, Tokenizer

MAX_PRIORITY = 2**31 - 1  # and the negative of it


def pages_for(tokens: int, page_size: int) -> int:
    return cdiv(tokens, page_size)


def least_resident(num_drafts: int, page_size: int) -> int:
    """Number of resident pages of a rank with which a request alone always has one for its next step: more than pages
    after :meth:`Capacity.front_pages`, with the drafts of the steps in flight."""
    return 4 + cdiv(5 * num_drafts, page_size)


@dataclass(frozen=True)
class Capacity:
    """Size of the caches of all ranks, and what fits in them when they are empty."""

    world_size: int
    cp_size: int
    pages: int  # of a rank
    page_size: int
    dcp_size: int = 1  # ranks that hold a request's pages together
    fewest: int | None = None  # the smallest limit of the run, where a request passes through two parts of it
    spilled: int = 0  # further pages of a rank, whose latent rows lie in host memory
    sets: int = 0  # of hot rows of a group, one for each request that runs there; 0: without hot rows

    @property
    def limit(self) -> int:
        """Maximum number of pages of a request."""
        return (self.pages + self.spilled) * self.dcp_size if self.fewest is None else self.fewest

    def max_pages(self, prompt_len: int, max_tokens: int) -> int:
        """Maximum number of pages that a request may hold; the last sampled token never enters the cache."""
        return pages_for(prompt_len + max_tokens - 1, self.page_size)

    def first_pages(self, request: Request, num_drafts: int) -> int:
        """Number of pages that a request enters with: for its tokens, and the drafts that the last step of its prefill
        makes. The last of them needs no row."""
        limit = len(request.prompt) + request.max_tokens - 1
        return pages_for(max(len(request), min(len(request) + max(0, num_drafts - 1), limit)), self.page_size)

    def front_pages(self, computed: int) -> int:
        """Number of a request's first pages that no step writes again, after so many tokens whose rows are final: all
        but the page of the last one and the page before."""
        return max(0, (computed - 1) // self.page_size - 1)

    def check(self, prompt_len: int, max_tokens: int, what: str = "this request", need: int | None = None) -> None:
        """Checks that a request of this size can run, if alone; or ``what``, which need ``need`` pages of one of
        the groups that hold them."""
        need = self.max_pages(prompt_len, max_tokens) if need is None else need
        if need > self.limit:
            memory = "cache_memory and host_cache_memory" if self.spilled else "cache_memory"
            has = f" of {self.dcp_size} ranks together" if self.dcp_size > 1 else ""
            raise CapacityError(
                f"the cache is too small for {what}: {prompt_len} prompt tokens and up to {max_tokens} new ones "
                f"({prompt_len + max_tokens} in all) need {need} pages of {self.page_size} tokens, the cache{has} "
                f"has {self.limit}; raise {memory} by a factor of {need / self.limit:.2f}, or take fewer requests "
                "or tokens"
            )


@dataclass
class Add:
    """A new request, checked and normalised by :func:`new_requests`: the caches can hold it, if alone. ``prompt_ids``:
    an array of int32: 4 bytes a token in memory, which the request shares, and in a message."""

    prompt_ids: Sequence[int]
    params: SamplingParams  # for one output, with ``max_tokens`` a number; a copy of the caller's object
    bad_words: list[list[int]] = field(default_factory=list)  # token ids of each word that must not be generated
    think_tokens: tuple[int, int] | None = None  # see ``Request.think_tokens``
    arrival: float = 0.0  # time of the call in seconds, by ``time.perf_counter`` on the rank that was called
    id: int = -1  # grows with the order of arrival; set when the message is sent
    cache_salt: str | None = None  # requests with different salts share no cached pages
    priority: int = 0  # lower ones come first
    delivery: Literal["tokens", "end"] = "tokens"  # what its caller gets, see ``Request.delivery``
    page_digests: bytes = b""  # of the prompt, ``PageDigests.joined``: no step of the engine waits until they are made
    compiled: Future[Any] | None = None  # its grammar, set by the loop of each rank


@dataclass(frozen=True)
class Limits:
    """What a request may ask of an engine."""

    max_model_len: int  # maximum number of tokens, prompt and output
    vocab_size: int
    capacity: Capacity
    no_selection: str | None = None  # why ``SamplingParams.selection`` is not possible; None: it is
    lookahead: int | None = None  # see :class:`.ledger.PrefixCache`; None: no page is found again

    def check(self, prompt: Sequence[int]) -> None:
        """Checks that a prompt can be prefilled, without room for an output; raises what :func:`new_requests` does."""
        check_prompt(prompt, 0, self.max_model_len, self.vocab_size)
        self.capacity.check(len(prompt), max_tokens=1)


def new_requests(
    prompt: Sequence[int],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
    limits: Limits,
    cache_salt: str | None = None,
) -> list[Add]:
    """Makes a message for each of the ``params.n`` outputs of a prompt that arrives now; any thread may call it.
    ``tokenizer``: gives the token ids of ``bad_words`` and of thoughts; may be None if there are none."""
    check_prompt(prompt, 1, limits.max_model_len, limits.vocab_size)
    for name in ("allowed_token_ids", "logit_bias"):
        for token in getattr(params, name) or ():
            if token >= limits.vocab_size:
                raise ValueError(f"{name} has token id {token}; the vocabulary has ids 0 … {limits.vocab_size - 1}")
    if params.selection and limits.no_selection is not None:
        raise ValueError(f"selection={params.selection} is not possible: {limits.no_selection}")
    room = limits.max_model_len - len(prompt)
    # As in vLLM, a request that asks for more tokens ends at the model's length.
    max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
    limits.capacity.check(len(prompt), max_tokens)
    form = params.structured_outputs
    if form is not None:
        form = StructuredOutputsParams(grammar=form.source())
    words = params.bad_words or () if tokenizer else ()
    bad_words = [ids for word in words for ids in tokenizer.word_ids(word)] if tokenizer else []
    think_tokens = None
    if params.asks & HAS_BUDGET:
        begin, end = (tokenizer.tags.get(text) if tokenizer else None for text in THINKING)
        if begin is None or end is None:
            raise ValueError(
                f"thinking_token_budget needs a tokenizer with the tokens {' and '.join(THINKING)}; leave it out"
            )
        think_tokens = begin, end
    prompt_ids, arrival = array("i", prompt), time.perf_counter()
    page_digests = b""
    if limits.lookahead is not None:
        digests = PageDigests(limits.capacity.page_size, limits.lookahead, cache_salt)
        digests.extend(len(prompt_ids), lambda start, length: prompt_ids[start : start + length])
        page_digests = digests.joined
    wanted = [limits.vocab_size if count == -1 else count for count in (params.logprobs, params.prompt_logprobs)]
    adds = []
    for number in range(params.n):
        own = copy(params)
        vars(own).update(  # not assigned, as that checks all parameters again
            n=1,
            seed=None if params.seed is None else params.seed + number,
            max_tokens=max_tokens,
            min_tokens=min(params.min_tokens, max_tokens),
            logprobs=wanted[0],
            prompt_logprobs=None if number else wanted[1],
            structured_outputs=form,
        )
        add = Add(prompt_ids, own, bad_words, think_tokens, arrival, cache_salt=cache_salt, page_digests=page_digests)
        adds.append(add)
    return adds


def check_prompt(prompt: Sequence[int], room: int, max_model_len: int, vocab_size: int) -> None:
    """Raises ``ValueError`` if a prompt is empty, has ids that the model lacks, or leaves no ``room`` tokens."""
    if not prompt:
        raise ValueError("the prompt is empty; give at least one token")
    if len(prompt) + room > max_model_len:
        room_for = f", of which at least {room} must be left for the output" if room else ""
        raise ContextLengthError.of(
            max_model_len, f"the prompt has {len(prompt)} tokens{room_for}; shorten the prompt or raise max_model_len"
        )
    lowest, highest = min(prompt), max(prompt)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"token id {wrong} is out of range; the vocabulary has ids 0 … {vocab_size - 1}")
