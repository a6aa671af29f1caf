"""The chunks of one prefill step, within its budgets of tokens and of fetches; and how often steps prefill."""

from __future__ import annotations

from collections.abc import Sequence

from dsa_engine.engine.cache.ledger import PageLedger
from dsa_engine.engine.requests.request import Chunk, Fetch, Request


class PrefillStep:
    """A prefill step that is being planned: the requests added first have the first choice of tokens.

    Args:
        groups: the ranks of each context-parallel group.
        tokens: maximum number of tokens that a group prefills in the step.
        ledger: says which pages a request has to fetch first.
        least_computed: fewest tokens of a request's last chunk.

    Attributes:
        chunks: those of the requests so far.
    """

    def __init__(self, groups: Sequence[range], tokens: int, ledger: PageLedger, least_computed: int):
        self.chunks: list[Chunk] = []
        self._groups, self._ledger, self._least_computed = groups, ledger, least_computed
        self._budget = [tokens] * len(groups)  # tokens that each group can still prefill

    def has_room(self, group: int) -> bool:
        """Whether a group can prefill more tokens."""
        return self._budget[group] > 0

    def add(self, request: Request) -> None:
        """Adds a request's chunk; none if no tokens and no fetches are left for it."""
        start, ranks = request.num_computed_tokens, self._groups[request.cp_group]
        fetches: tuple[Fetch, ...] = ()
        if waiting := list(self._ledger.fetching(request)):
            fetches = self._ledger.next_fetches(request, [fetch for chunk in self.chunks for fetch in chunk.fetches])
            if len(fetches) < len(waiting):
                if fetches:
                    self.chunks.append(Chunk(request, start, 0, ranks, fetches=fetches))
                return
        remaining = request.num_prefill_tokens - start
        length = min(remaining, self._budget[request.cp_group])
        if 0 < remaining - length < self._least_computed:
            length = max(0, remaining - self._least_computed)
        if length or fetches:
            self._budget[request.cp_group] -= length
            self.chunks.append(Chunk(request, start, length, ranks, fetches=fetches))


class PrefillShare:
    """Lets at most a fraction of the steps prefill that are taken while any request decodes.

    Every such step earns a part of a prefill step. What is earned and not used is capped at one step: a late request is
    prefilled at once, but no burst of prefills follows. A step counts once it has been launched.

    Args:
        maximum: the fraction, in (0, 1]; 1 puts prefill first.
    """

    def __init__(self, maximum: float):
        self._maximum = maximum
        self._credit = 0.0  # prefill steps that may be taken while any request decodes
        self._credit_after = 0.0  # the same after the step scheduled last

    def may_prefill(self, decoding: bool) -> bool:
        """Begins a step; returns whether it may prefill. ``decoding``: whether any request decodes."""
        self._credit_after = min(1.0, self._credit) + self._maximum if decoding else self._credit
        return not decoding or self._credit_after > 1 - 1e-9

    def prefills(self, decoding: bool) -> None:
        """Records that the step does prefill."""
        self._credit_after -= 1.0 if decoding else 0.0

    def launched(self) -> None:
        """Records that the step has been launched."""
        self._credit = self._credit_after
