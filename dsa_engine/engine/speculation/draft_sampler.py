"""Drafts are drawn as the sampler will draw the tokens at their positions: by its chain, with the same random numbers.

So the draws of module and model agree wherever their distributions do: with a probability of at least (1 − d) / (1 + d)
at a total variation distance d (arXiv:2408.07978). The token never depends on the draft. What follows from tokens that
the host knows is left out: biases, forbidden tokens, masks of a grammar; a draft that they forbid is not accepted.
"""

from __future__ import annotations

import torch

from dsa_engine.engine.sampling.chain import Inputs, changed, choose
from dsa_engine.engine.sampling.logits_processors import with_tokens


class DraftSampler:
    """Makes the drafts of n requests, one position after the other, after a step of theirs.

    Args:
        how: ``asks`` and ``top_k`` of :class:`.Inputs`.
        table: ``[fields, n]``, see :meth:`.Parameters.pack`; None if nothing is drawn or penalised.
        counts: int32 ``[n, vocab]``, of the tokens before the step, see :func:`.penalised`; None: no penalties.
        position: int64 ``[n]``, of the last tokens.
        tokens: int64 ``[n, 1 + count]``, chosen after each row.
        accepted: int64 ``[n]``.
    """

    def __init__(
        self,
        how: tuple[int, int],
        table: torch.Tensor | None,
        counts: torch.Tensor | None,
        position: torch.Tensor,
        tokens: torch.Tensor,
        accepted: torch.Tensor,
    ):
        self._inputs = Inputs(*how)  # a row for each request, for its next draft; counts are always the same tensor
        if table is not None:
            self._inputs = self._inputs._replace(table=table, positions=position + 1)
        if counts is not None:
            number = torch.arange(tokens.shape[1], device=tokens.device)
            with_new = with_tokens(counts, tokens, number <= accepted[:, None])
            self._inputs = self._inputs._replace(counts=lambda: with_new)

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The next draft of each request, int64 ``[n]``; always the same launches. ``logits``: float32 ``[n, vocab]``,
        overwritten."""
        of = self._inputs
        drafts = choose(changed(logits, of), of)
        if of.positions is not None:
            self._inputs = of._replace(positions=of.positions + 1)
        if of.counts is not None:
            of.counts().scatter_add_(1, drafts[:, None], torch.full_like(drafts[:, None], 2, dtype=torch.int32))
        return drafts
