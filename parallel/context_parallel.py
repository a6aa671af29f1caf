"""Context parallelism: how the tokens of a sequence are divided over ranks.

Every rank holds the activations of its own tokens only. The cache rows of a step (latent and index key side by side)
are gathered in one asynchronous collective (``attention.py``) and written to their causal slots directly, so that the
order in which ranks hold tokens costs no reordering pass.
"""

from __future__ import annotations

from typing import Literal

CpLayout = Literal["head_tail", "contiguous"]


def split_sequence(start: int, length: int, ranks: int, layout: str = "head_tail") -> list[list[tuple[int, int]]]:
    """Divides the tokens ``start … start+length-1`` of a sequence over ``ranks``.

    "head_tail" gives rank r the pieces r and ``2 · ranks - 1 - r`` of ``2 · ranks``: one cheap piece near the head and
    one dear piece near the tail, so that causal work is the same on every rank up to one token. Ranks differ by at most
    one token, and an odd token goes to the head piece, where it costs least. "contiguous" gives rank r the r-th of
    ``ranks`` pieces.

    Returns:
        for every rank its segments ``(start, length)`` in order of position; pieces that meet are joined, empty ones
        left out. Any length works, also shorter than the number of pieces.
    """
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    tails = [count // 2 if layout == "head_tail" else 0 for count in counts]
    divided = []
    head, tail = start, start + length  # what lies between is not given out yet
    for count, behind in zip(counts, tails, strict=True):
        before = count - behind
        tail -= behind
        if head + before == tail:
            segments = [(head, count)]
        else:
            segments = [(head, before), (tail, behind)]
        divided.append([segment for segment in segments if segment[1]])
        head += before
    return divided
