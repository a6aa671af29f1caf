"""Context parallelism: the division of a sequence's tokens over ranks.

Every rank holds only the activations of its own tokens. The cache rows of a step (latent and index key side by side)
are gathered in one asynchronous collective (``Attention._gather_cache_rows``) and written directly to their causal
slots, so that the order of the ranks' tokens costs no reordering pass.
"""

from __future__ import annotations

import torch


def pieces_of(
    start: torch.Tensor, length: torch.Tensor, index: torch.Tensor, ranks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pieces of the tokens ``start … start+length-1`` of sequences, each divided over its number of ``ranks``.

    Rank r gets the pieces r and ``2 · ranks - 1 - r`` of ``2 · ranks``: a cheap piece near the head and an expensive
    piece near the tail, so that causal work is the same on every rank up to one token. Ranks differ by at most one
    token, and an odd token goes to the head piece, where it costs least. Any length works, even one below the number
    of pieces.

    All arguments are int64 ``[n]``; ``index`` is the rank whose pieces are asked for. Returns starts and lengths of the
    two pieces, in order of position, int64 ``[n, 2]`` each. Of adjacent pieces the first has all tokens.
    """
    least, more = length // ranks, length % ranks
    with_one_more = torch.minimum(index, more)  # ranks before this one that have a token more than the last ones
    count, before = least + (index < more), index * least + with_one_more
    tails, tails_before = count // 2, index * (least // 2) + with_one_more * ((least + 1) // 2 - least // 2)
    head_start, tail_start = start + before - tails_before, start + length - tails_before - tails
    tails = tails.where(head_start + count - tails != tail_start, 0)
    return torch.stack((head_start, tail_start), dim=1), torch.stack((count - tails, tails), dim=1)
