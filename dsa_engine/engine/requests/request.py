"""A request from its arrival to its end: its tokens, and which of them are in the cache.

A token that has been sampled but not read is known to the device only. The request holds a placeholder for it: the
token's index in ``StepResult.tokens`` of the step that samples it. :meth:`Request.tokens` returns a placeholder as a
negative number, which ``batch.known_ids`` replaces on the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dsa_engine.outputs import Logprobs, Selection
from dsa_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

_DIGEST_BYTES = 16
NEVER = 2**40  # later than any position


class Ending(NamedTuple):
    """How a request ends."""

    reason: str  # "stop", "length", "abort" or "error"
    error: str | None = None  # what went wrong, with "error"
    stop_reason: int | str | None = None  # the stop token or stop string, with "stop"


class RequestRecord(NamedTuple):
    """The fields of a request that its outputs show, see :class:`Request`."""

    preemptions: int = 0
    draft_stats: Sequence[tuple[int, int]] = ()
    num_cached_tokens: int | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    admitted_at: float | None = None
    first_token_at: float | None = None
    rows_by_form: tuple[int, int, int] = (0, 0, 0)
    selection: dict[int, Selection] = {}


class Fetch(NamedTuple):
    """A page of a request whose rows one rank sends to another of the same context-parallel group."""

    number: int  # the page's, in the request, from 0
    digest: bytes
    source: int  # the rank that has it
    rank: int  # the rank that lacks it


class LastRows(NamedTuple):
    """A request's last computed positions, one fewer than there are MTP modules; tensors on the device."""

    states: torch.Tensor  # [modules - 1, hidden], the model's hidden states
    tokens: torch.Tensor  # [modules - 1] int64


class PageDigests:
    """The names under which a request's full pages are found again: equal digests mean equal rows.

    A digest covers the salt, all tokens up to the end of the page and, with MTP modules, the next tokens: the k-th
    module embeds the token k positions later, so its last rows in a page depend on the first tokens after the page.
    It is made of the digest before it and of these tokens. Requests with different salts have no digest in common.

    ``joined``: those of a prompt, :attr:`joined` of another object; of no use if it has other sizes or another salt.
    """

    def __init__(self, page_size: int, lookahead: int = 0, salt: str | None = None, joined: bytes = b""):
        self._page_size, self._lookahead = page_size, lookahead
        start = f"{page_size} {lookahead}" if salt is None else f"{page_size} {lookahead} salt {salt}"
        self._start = _digest(start.encode(errors="surrogatepass"))
        known = joined[_DIGEST_BYTES:] if joined[:_DIGEST_BYTES] == self._start else b""
        self.values: list[bytes] = np.frombuffer(known, f"V{_DIGEST_BYTES}").tolist()  # of the pages so far

    @property
    def joined(self) -> bytes:
        return b"".join((self._start, *self.values))

    def extend(self, known: int, tokens: Callable[[int, int], array[int]]) -> list[bytes]:
        """Adds the digests of pages whose tokens, and those after them, are known now; returns all. ``tokens``:
        ``tokens(start, length)`` gives their ids, int32."""
        size, ahead, first = self._page_size, self._lookahead, len(self.values)
        count = (known - ahead) // size - first
        if count <= 0:
            return self.values
        ids = tokens(first * size, count * size + ahead).tobytes()
        values, width, more = self.values, 4 * size, 4 * ahead
        last = values[-1] if values else self._start
        for start in range(0, count * width, width):
            last = _digest(last + ids[start : start + width + more])
            values.append(last)
        return values


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_DIGEST_BYTES).digest()


@dataclass(eq=False)
class Request:
    """``len(request)`` counts placeholders, ``output`` does not contain them."""

    id: int  # grows with the order of arrival
    prompt: Sequence[int]  # kept as an array of int32
    params: SamplingParams
    bad_words: list[list[int]] = field(default_factory=list)  # token ids of each word
    think_tokens: tuple[int, int] | None = None  # that begin and end a thought, if it has a budget
    # By the tokens that begin and end thoughts: tokens looked at, and where the one that is open after them began.
    thoughts: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    output: list[int] = field(default_factory=list)
    placeholders: list[int] = field(default_factory=list)  # tokens not read yet, oldest first; see the module
    drafts: list[int] = field(default_factory=list)  # guesses of the next tokens; not part of the length
    draft_stats: list[tuple[int, int]] = field(default_factory=list)  # (verified, accepted) drafts of each step
    last_rows: LastRows | None = None  # on the owner, if there are several MTP modules
    num_computed_tokens: int = 0  # tokens whose rows are in the cache, or will be when the steps in flight are done
    num_prefill_tokens: int = field(init=False)  # tokens to prefill: the prompt, and the output before a preemption
    preemptions: int = 0  # how often it has lost its pages
    cache_salt: str | None = None  # requests with different salts share no pages
    page_digests: bytes = b""  # see ``Add.page_digests``
    priority: int = 0  # lower ones come first
    num_tokens_found: int = 0  # while it waits: those in the prefix cache when it was queued
    credit: int = 0  # eighths of prefill tokens by which others may overtake it, see ``PrefillStep``
    expected_output: int = 0  # tokens, see ``OutputLengths``
    reads_prefix_cache: bool = True  # False: all tokens are computed
    digests: PageDigests | None = None  # of its full pages; None: its pages are neither found nor kept
    num_named_pages: int = 0  # its first pages, which other requests can find
    num_found_pages: int = 0  # its first pages, which other requests have computed
    searched_disk: bool = False  # whether its pages have been looked for on the disk
    rows_by_form: tuple[int, int, int] = (0, 0, 0)  # computed in MHA, dense MQA, sparse MQA form; see ``count_rows``
    num_cached_tokens: int | None = None  # tokens found in the prefix cache when it was first admitted
    admitted_at: float | None = None  # time of that, by time.perf_counter
    cp_group: int = 0  # the context-parallel group that prefills it
    owner: int = 0  # the rank that decodes it
    pages: Sequence[int] = ()  # on this rank; another one holds it in other pages or not at all
    hot_set: int = 0  # of hot rows, of the ranks that hold its pages together, while it runs
    finish_reason: str | None = None  # this and the next two: see Ending
    error: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None  # for the prompt's tokens so far, if requested
    selection: dict[int, Selection] = field(default_factory=dict)  # by number of the output token, if requested
    asks: int = field(init=False)  # of the sampler, see ``SamplingParams.asks``
    draw_key: int = 0  # fixes its random numbers, see ``chain.seed_key``
    # What ``Engine.step`` returns of it on this rank: its tokens as they come; all of them at its end; or only that it
    # has ended.
    delivery: Literal["tokens", "end", "nothing"] = "tokens"
    tracked: bool = False  # whether this object always has its output and drafts, as on its owner
    first_token_at: float | None = None  # time of its first token, by time.perf_counter
    exception: BaseException | None = None  # raised by a step of this request, for its caller to raise

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, array):
            self.prompt = array("i", self.prompt)
        self.num_prefill_tokens = len(self.prompt)
        self.asks = self.params.asks
        if self.params.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # the first token follows no other

    def __len__(self) -> int:
        return len(self.prompt) + len(self.output) + len(self.placeholders)

    @property
    def max_tokens(self) -> int:
        """Maximum number of output tokens; ``limits.py`` sets it if the caller did not."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens whose ids the host knows: all but placeholders."""
        return len(self.prompt) + len(self.output)

    @property
    def order(self) -> tuple[int, int]:
        """By priority, then by arrival."""
        return self.priority, self.id

    @property
    def num_remaining(self) -> int:
        """Number of tokens that are left to prefill."""
        return self.num_prefill_tokens - max(self.num_computed_tokens, self.num_tokens_found)

    @property
    def prefilled(self) -> bool:
        return self.num_computed_tokens >= self.num_prefill_tokens

    @property
    def ending(self) -> Ending | None:
        return None if self.finish_reason is None else Ending(self.finish_reason, self.error, self.stop_reason)

    def tokens(self, start: int, length: int) -> array[int]:
        """Token ids at positions ``start … start+length-1``, int32; ``-1 - index`` for placeholders, then drafts."""
        first_output, end = len(self.prompt), start + length
        ids = array("i", self.prompt[start:end])
        ids.extend(self.output[max(0, start - first_output) : max(0, end - first_output)])
        if len(ids) < length:
            first_unread = first_output + len(self.output)
            unread = [-1 - index for index in self.placeholders] + self.drafts
            ids.extend(unread[max(0, start - first_unread) : end - first_unread])
        return ids

    @property
    def record(self) -> RequestRecord:
        return RequestRecord(*(getattr(self, name) for name in RequestRecord._fields))

    def append(self, token: int, eos_token_ids: Collection[int]) -> Ending | None:
        """Adds the next token to the output; returns how the request ends with it, None if it goes on. Stop strings,
        which appear only in the text, are found on the caller's side (``reply.py``)."""
        self.output.append(token)
        params, count = self.params, len(self.output)
        if count > params.min_tokens:
            if token in eos_token_ids and not params.ignore_eos:
                return Ending("stop")
            if token in (params.stop_token_ids or ()):
                return Ending("stop", stop_reason=token)
        return Ending("length") if count >= self.max_tokens else None

    def add_prompt_logprobs(self, by_position: Mapping[int, Logprobs]) -> None:
        """Adds log-probabilities of the prompt's next tokens."""
        assert self.prompt_logprobs is not None
        for position in sorted(by_position):
            self.prompt_logprobs[position:] = [by_position[position]]

    def count_rows(self, rows: Sequence[int]) -> None:
        mha, dense, sparse = (before + new for before, new in zip(self.rows_by_form, rows, strict=True))
        self.rows_by_form = mha, dense, sparse

    def restart(self) -> None:
        """Forgets the cache rows: all tokens so far are prefilled again, the output included."""
        self.drafts, self.last_rows, self.placeholders = [], None, []  # tokens in flight are computed again
        self.num_computed_tokens, self.num_prefill_tokens = 0, len(self)


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start … start+length-1`` of a request, computed in one step by ``ranks`` together; none while its rows
    are still travelling between the ranks."""

    request: Request
    start: int
    length: int
    ranks: range
    num_logits: int = -1  # number of last tokens with logits; -1: 1 if the chunk reaches the last token, else 0
    # A step in flight decides on the device where the chunk starts: at ``start`` if all drafts are accepted, or before.
    starts_on_device: bool = False
    fetches: tuple[Fetch, ...] = ()  # pages that the ranks send to each other before they compute

    def __post_init__(self) -> None:
        if self.num_logits < 0:
            object.__setattr__(self, "num_logits", int(self.end == len(self.request)))

    @property
    def end(self) -> int:
        return self.start + self.length
