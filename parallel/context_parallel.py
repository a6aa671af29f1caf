"""Context parallelism: the division of a sequence's tokens over ranks.

Every rank holds only the activations of its own tokens. The cache rows of a step (latent and index key side by side)
are gathered in one asynchronous collective (``Attention._gather_cache_rows``) and written directly to their causal
slots, so that the order of the ranks' tokens costs no reordering pass.
"""

from __future__ import annotations

from typing import Literal

CpLayout = Literal["head_tail", "contiguous"]


def split_sequence(start: int, length: int, ranks: int, layout: CpLayout = "head_tail") -> list[list[tuple[int, int]]]:
    """Divides the tokens ``start … start+length-1`` of a sequence over ``ranks``.

    "head_tail" gives rank r the pieces r and ``2 · ranks - 1 - r`` of ``2 · ranks``: a cheap piece near the head and an
    expensive piece near the tail, so that causal work is the same on every rank up to one token. Ranks differ by at
    most one token, and an odd token goes to the head piece, where it costs least. "contiguous" gives rank r the r-th of
    ``ranks`` pieces. Any length works, even one below the number of pieces.

    Returns:
        for every rank its segments ``(start, length)`` in order of position; adjacent pieces are joined, empty ones
        omitted.
    """
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    tails = [count // 2 if layout == "head_tail" else 0 for count in counts]
    divided = []
    head, tail = start, start + length  # the tokens between them are not assigned yet
    for count, at_tail in zip(counts, tails, strict=True):
        at_head = count - at_tail
        tail -= at_tail
        if head + at_head == tail:
            segments = [(head, count)]
        else:
            segments = [(head, at_head), (tail, at_tail)]
        divided.append([segment for segment in segments if segment[1]])
        head += at_head
    return divided
