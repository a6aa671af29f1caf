"""Context lengths that decode steps are padded to, so that few graphs serve all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.kernels.runtime.integers import next_power_of_2


@dataclass(frozen=True)
class ContextBuckets:
    """Context lengths in tokens: powers of two below ``max_model_len``, and the length of the longest request.

    That length is ``max_model_len`` with drafts, in whole pages. The next power of two would be twice as long if
    ``max_model_len`` is a power of two itself.
    """

    max_model_len: int | None = None  # maximum number of tokens of a request; None: powers of two only
    page_size: int = 1
    fewest: int = 4096  # the smallest length below max_model_len: shorter ones gain nothing from another graph
    # Steps of at most this many rows keep their number of requests, and larger ones are not padded; None: every step is
    # padded to a power of two of requests.
    exact_rows: int | None = None

    def of(self, tokens: int, num_drafts: int = 0) -> int:
        """The smallest length with room for ``tokens`` that a row may see: the longest request, its drafts, and the
        ``num_drafts`` that are made next."""
        context = next_power_of_2(max(tokens, self.fewest))
        if self.max_model_len is None or context < self.max_model_len:
            return context
        # A step may follow a step in flight whose drafts count as accepted, though the request may end with them.
        longest = self.max_model_len + 2 * num_drafts + max(0, num_drafts - 1)
        return max(tokens, pages_for(longest, self.page_size) * self.page_size)

    def all(self, num_drafts: int = 0) -> list[int]:
        """All lengths that :meth:`of` may return, the smallest first."""
        assert self.max_model_len is not None
        contexts = [self.of(1, num_drafts)]
        while contexts[-1] < self.max_model_len:
            contexts.append(self.of(contexts[-1] + 1, num_drafts))
        return contexts
