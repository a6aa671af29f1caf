"""Lengths that the longest context of a decode step is padded to, so that few graphs serve all steps."""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.engine.requests.pages import pages_for
from dsa_engine.kernels.runtime.integers import next_power_of_2

# Shorter contexts gain nothing from graphs of their own.
FEWEST_TOKENS = 4096


@dataclass(frozen=True)
class ContextBuckets:
    """Powers of two, and in place of the first that is not below ``max_model_len`` what the longest request takes with
    its drafts, in whole pages: the last drafts of one whose limit is a power of two do not ask for twice as much.

    Attributes:
        max_model_len: most tokens of a request; None: powers of two only.
        page_size: tokens a page.
        fewest: tokens of the smallest, where that is below ``max_model_len``.
    """

    max_model_len: int | None = None
    page_size: int = 1
    fewest: int = FEWEST_TOKENS

    def of(self, tokens: int, num_drafts: int = 0) -> int:
        """The smallest with room for so many.

        Args:
            tokens: that a row may see: those of the longest request, drafts that are verified, and ``num_drafts`` that
                are then made.
        """
        context = next_power_of_2(max(tokens, self.fewest))
        if self.max_model_len is None or context < self.max_model_len:
            return context
        # A step may follow on one in flight, whose drafts count as accepted: the request may end with these.
        longest = self.max_model_len + 2 * num_drafts + max(0, num_drafts - 1)
        return max(tokens, pages_for(longest, self.page_size) * self.page_size)

    def all(self, num_drafts: int = 0) -> list[int]:
        """All that :meth:`of` may return, the smallest first."""
        assert self.max_model_len is not None
        contexts = [self.of(1, num_drafts)]
        while contexts[-1] < self.max_model_len:
            contexts.append(self.of(contexts[-1] + 1, num_drafts))
        return contexts
