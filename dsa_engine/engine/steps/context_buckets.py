"""The shapes that decode steps are padded to, so that few graphs serve all steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.requests.samples import DecodeStep
from dsa_engine.kernels.runtime.integers import next_power_of_2


@dataclass(frozen=True)
class Bucket:
    """Static shape that a decode step is padded to; every request has the same number of rows."""

    requests: int
    rows_per_request: int
    context: int  # maximum number of tokens that a row sees
    is_cut: bool = False  # in two micro-batches, each of half of the requests
    for_graph: bool = True  # False: the shape of one step, which runs eagerly

    @property
    def rows(self) -> int:
        return self.requests * self.rows_per_request


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
        context = pages_for(longest, self.page_size) * self.page_size
        return context if tokens <= context else next_power_of_2(tokens)

    def all(self, num_drafts: int = 0) -> list[int]:
        """All lengths that :meth:`of` may return, the smallest first."""
        assert self.max_model_len is not None
        contexts = [self.of(1, num_drafts)]
        while contexts[-1] < self.max_model_len:
            contexts.append(self.of(contexts[-1] + 1, num_drafts))
        return contexts


def own_bucket(step: DecodeStep) -> Bucket:
    """The shape of a step that runs eagerly, on every rank."""
    samples = step.samples
    rows = int(samples.counts.max())
    context = max(int(step.starts.max()) + rows, step.least_context)
    return Bucket(int(samples.numbers.max()) + 1, rows, context, for_graph=False)


def bucket_of(step: DecodeStep | Sequence[Chunk], contexts: ContextBuckets, num_drafts: int = 0) -> Bucket | None:
    """The smallest bucket that a decode step fits in; None if it has too many rows for one. The context has room for
    the ``num_drafts`` drafts that the step makes, and every request has rows to verify as many."""
    least = 0
    if isinstance(step, DecodeStep):
        ranks, counts, starts, least = step.samples.ranks, step.samples.counts, step.starts, step.least_context
    else:
        columns = [(chunk.ranks.start, chunk.length, chunk.start) for chunk in step]
        ranks, counts, starts = np.array(columns, np.int64).T
    rows = max(1 + num_drafts, int(counts.max()))
    # A request with fewer rows is padded with rows after its last one.
    context = contexts.of(max(int(starts.max()) + rows + num_drafts, least), num_drafts)
    requests = int(np.bincount(ranks).max())
    if contexts.exact_rows is None:
        return Bucket(next_power_of_2(requests), rows, context)
    return Bucket(requests, rows, context) if requests * rows <= contexts.exact_rows else None
