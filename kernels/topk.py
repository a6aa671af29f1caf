"""Selection of the k highest scores of every row, exactly and deterministically.

A tie at the k-th place goes to the lower position, and positions come back in ascending order, so that the gathers that
follow walk the cache forward. A score of −inf is never selected. A row may be shorter than the matrix is wide: what
lies behind its length is never selected, whatever it holds.
"""

from __future__ import annotations

import torch


def select_topk_reference(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = scores.shape
    if lengths is not None:
        scores.masked_fill_(torch.arange(width, device=scores.device) >= lengths[:, None], float("-inf"))
    kept = min(k, width)
    top = scores.topk(kept, dim=-1, sorted=False)
    threshold = top.values.amin(dim=-1, keepdim=True)
    positions = top.indices
    # Rows in which more scores equal the threshold than were taken: torch.topk's choice among them is arbitrary.
    taken = (top.values == threshold).sum(dim=-1, dtype=torch.int32)
    tied = ((scores == threshold).count_nonzero(dim=-1) > taken).nonzero().squeeze(-1)
    if tied.numel():
        row, line = scores[tied], threshold[tied]
        equal = row == line
        wanted = (row > line) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= taken[tied, None]))
        positions[tied] = wanted.nonzero()[:, 1].view(-1, kept)
    selectable = top.values > float("-inf")
    counts = selectable.sum(dim=-1, dtype=torch.int32)
    if not bool(selectable.all()):
        masked = scores.gather(1, positions) == float("-inf")
        positions = positions.masked_fill(masked, width)
    positions = positions.int().sort(dim=-1).values
    positions = positions.masked_fill(positions == width, -1)
    if kept < k:
        positions = torch.cat((positions, positions.new_full((rows, k - kept), -1)), dim=-1)
    return positions, counts


def select_topk(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best positions of each row of ``scores [R, W]`` (float32).

    Args:
        scores: any row stride; columns follow one another.
        k: how many to select.
        lengths: ``[R]`` int32, how many columns of each row count; what lies behind them may be overwritten. All, if
            not given.

    Returns:
        positions ``[R, k]`` int32, ascending, −1 behind the last; counts ``[R]`` int32, how many were selected.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or scores.shape[1] == 0:
        raise ValueError(f"scores must be float32 [rows, width > 0], not {scores.dtype} {tuple(scores.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if lengths is not None and lengths.shape != scores.shape[:1]:
        raise ValueError(f"lengths must be [{scores.shape[0]}], one for each row, not {tuple(lengths.shape)}")
    return select_topk_reference(scores, k, lengths)
