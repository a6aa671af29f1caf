"""Masks of the tokens that may come next in requests with ``structured_outputs``.

Every rank compiles a grammar, in a thread, before its requests are queued: it may take seconds. The owner of a request
alone has the state of its grammar, a matcher, which follows from the tokens of the output: it takes those that are new,
whichever step made them, and one that a new owner makes takes all. The mask of a row depends on the tokens before it,
drafts included, so the host needs these; the masks are made there, in parallel, and applied on the device. A row after
a draft that the grammar refuses has no mask: that draft is not accepted, and the row is void.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch

from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.text.tokenizer import Tokenizer

_CACHED = 32  # compiled grammars; one takes up to 100 MB (config/grammar_check.py), most take less than 1
_STACK = 2**26  # more than a grammar may take that was checked


def without_tags(tokenizer: Tokenizer) -> str:
    """The JSON of a tokenizer in which tags have names that no text has. Else the library spells a text of a form, such
    as ``<think>`` in a choice, by the tag, which its mask then allows and its matcher refuses."""
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"structured outputs need a tokenizer.json, which {tokenizer.folder} has not")
    made = json.loads(backend.to_str()) | {"padding": None, "truncation": None}
    names = {text: f"<\ue000{number}>" for text, number in tokenizer.tags.items()}
    for token in made["added_tokens"]:
        if token["content"] in names:
            token |= {"content": names[token["content"]], "special": True}
    words = made["model"]["vocab"]
    if isinstance(words, dict):
        made["model"]["vocab"] = {names.get(text, text): number for text, number in words.items()}
    return json.dumps(made, ensure_ascii=False)


class GrammarMasks:
    """Makes masks for the rows of this rank's requests. ``eos_token_ids``: the tokens that end an output once its
    grammar allows that."""

    def __init__(self, folder: Path, trust_remote_code: bool, vocab: int, eos_token_ids: Sequence[int]):
        self._folder, self._trusts, self._vocab, self._ends = folder, trust_remote_code, vocab, list(eos_token_ids)
        # Each request's matcher, the position that it has come to, and the tokens before it that were not read then.
        self._matchers: WeakKeyDictionary[Request, tuple[Any, int, list[int]]] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, "dsa_engine grammars")
        # The matcher of a grammar, before any token. All ranks ask for the same ones in the same order.
        self.compiled = lru_cache(_CACHED)(lambda source: self._submit(self._compile, source))
        self.ready: WeakSet[Future[Any]] = WeakSet()  # those that rank 0 has said to be compiled
        self.begun: WeakKeyDictionary[Request, Future[Any]] = WeakKeyDictionary()  # of each request

    @cached_property
    def _threads(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(without_tags(Tokenizer(self._folder, self._trusts)), self._vocab, self._ends)

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        before = threading.stack_size(_STACK)  # of the thread, which the first work begins
        try:
            return self._thread.submit(work, *arguments)
        finally:
            threading.stack_size(before)

    def load(self) -> Future[Any]:
        """The tokenizer as llguidance needs it, loaded in the thread: that takes a second for a large one."""
        return self._submit(getattr, self, "_tokens")

    def _compile(self, source: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, source, log_level=0)
        matcher.deep_copy().compute_bitmask()  # copies share what it finds
        return matcher

    def _matcher(self, request: Request, end: int, read: Callable[[], torch.Tensor] | None) -> Any:
        """A request's matcher after its tokens before position ``end``; for ``read`` see :meth:`masks`."""

        def tokens(start: int, stop: int) -> list[int]:
            ids = request.tokens(start, max(0, min(stop, end) - start))
            return [token if token >= 0 or read is None else int(read()[-1 - token]) for token in ids]

        matcher, taken, ahead = self._matchers.get(request, (None, 0, []))
        if matcher is None or tokens(taken - len(ahead), taken) != ahead:  # a preemption has undone their step
            matcher, taken = self.begun[request].result().deep_copy(), len(request.prompt)
        new = tokens(taken, end)
        if min(new, default=0) >= 0:  # a negative token is the code of an error; its request has ended
            matcher.consume_tokens(new)  # what it refuses is an error of its own
        known = min(end, request.num_known_tokens)
        self._matchers[request] = matcher, end, new[max(0, known - taken) :]
        return matcher

    def masks(
        self,
        wanted: Sequence[Wanted],
        numbers: Sequence[int],
        rows: int,
        read: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor | None:
        """The masks of a step's tokens; None if no request of ``wanted`` has a grammar.

        Args:
            numbers: the row of each in the result; those of a request follow each other.
            rows: number of rows of the result.
            read: waits for the tokens of the step before and returns them, if they have not been read.

        Returns:
            int32 ``[rows, ceil(vocab / 32)]`` on the host; bit i % 32 of integer i / 32 says whether token i may come.
        """
        single: list[tuple[Any, int]] = []
        drafted: list[tuple[Any, int, list[int]]] = []
        masks = np.full((0, cdiv(self._vocab, 32)), -1, np.int32)
        for request, of_request in groupby(zip(wanted, numbers), key=lambda one: one[0].request):
            if request.params.structured_outputs is None:
                continue
            if not len(masks):
                masks = np.full((rows, masks.shape[1]), -1, np.int32)
            (first, number), *others = of_request
            matcher = self._matcher(request, first.position, read)
            if matcher.is_error():  # a refusal, or too costly a mask; the request ends, as no token is allowed
                masks[number] = 0
            elif drafts := list(request.tokens(first.position, len(others))):
                drafted.append((matcher, number, drafts))
            else:
                single.append((matcher, number))
        if not len(masks):
            return None
        at = masks.ctypes.data, masks.strides[0], rows
        if single:
            self._threads.unsafe_compute_mask_ptr(single, *at)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *at)
        return torch.from_numpy(masks)


def masked(logits: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Logits ``[n, vocab]`` with -inf for the tokens that masks (:meth:`GrammarMasks.masks`, on the same device)
    forbid; its launches depend on shapes only."""
    allowed = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=masks.device) & 1
    return logits.masked_fill(allowed.flatten(1)[:, : logits.shape[1]] == 0, float("-inf"))
