"""Context parallelism: how the tokens of a sequence are divided over ranks, and how their cache rows come together.

Every rank holds the activations of its own tokens only. The cache rows of a step (latent and index key side by side)
are gathered in one asynchronous collective and written to their causal slots directly, so that the order in which ranks
hold tokens costs no reordering pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from dsa_engine.parallel.group import Group


def split_sequence(start: int, length: int, ranks: int, layout: str = "head_tail") -> list[list[tuple[int, int]]]:
    """Divides the tokens ``start … start+length-1`` of a sequence over ``ranks``.

    "head_tail" gives rank r the pieces r and ``2 · ranks - 1 - r`` of ``2 · ranks``: one cheap piece near the head and
    one dear piece near the tail, so that causal work is the same on every rank up to one token. Ranks differ by at most
    one token, and an odd token goes to the head piece, where it costs least. "contiguous" gives rank r the r-th of
    ``ranks`` pieces.

    Returns:
        for every rank its runs ``(start, length)`` in order of position; pieces that meet are joined, empty ones left
        out. Any length works, also shorter than the number of pieces.
    """
    counts = [length // ranks + (rank < length % ranks) for rank in range(ranks)]
    tails = [count // 2 if layout == "head_tail" else 0 for count in counts]
    divided = []
    head, tail = start, start + length  # what lies between is not given out yet
    for count, behind in zip(counts, tails, strict=True):
        before = count - behind
        tail -= behind
        if head + before == tail:
            runs = [(head, count)]
        else:
            runs = [(head, before), (tail, behind)]
        divided.append([run for run in runs if run[1]])
        head += before
    return divided


def gather_cache_rows(
    latent: torch.Tensor, index_key: torch.Tensor | None, rows: int, group: Group
) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
    """Starts gathering the cache rows of a step from every rank of the group, packed into one buffer.

    Args:
        latent: this rank's ``[T, latent_dim]``.
        index_key: this rank's ``[T, index_head_dim]``, same dtype, or None for a layer without an indexer.
        rows: rows that each rank sends, at least the largest T of the group; the rest is padding, whose slot is −1.
        group: the context-parallel group.

    Returns:
        a function that waits and returns both for the whole group, ``[size · rows, …]``, as views of the buffer.
    """
    packed = latent if index_key is None else torch.cat((latent, index_key), dim=-1)
    wait = group.all_gather_async(F.pad(packed, (0, 0, 0, rows - packed.shape[0])))

    def unpack() -> tuple[torch.Tensor, torch.Tensor | None]:
        gathered = wait()
        width = latent.shape[-1]
        return gathered[:, :width], None if index_key is None else gathered[:, width:]

    return unpack
