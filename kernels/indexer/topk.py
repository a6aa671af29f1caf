"""Selection of the k highest scores of every row, exactly and deterministically.

    positions[r] = the first k of the columns c < lengths[r] with scores[r, c] > −inf, by falling score, then by c

Shapes: ``scores [R, W]`` float32 of any row stride, ``lengths [R]`` int32; positions ``[R, k]`` and counts ``[R]`` are
int32. Of equal scores the lower position wins (−0 equals +0), and positions come back in ascending order, so
that the gathers that follow walk the cache forward. A score of −inf is never selected; NaN is above everything, as for
``torch.topk``. Columns beyond a row's length are never selected, whatever they hold. The columns of a score matrix are
positions in a sequence; given its pages, the slots of the positions are the result.

Both kernels read a row once, and a sample of a long one before that. Of few rows, as in decode, each has many programs,
and the last to finish selects among what all have set aside (`_topk_spans_kernel.py`). Many rows are taken in turn by a
fixed number of programs, so that their buffers (75 KB each) do not grow with the rows (`_topk_kernel.py`); a program
that has a multiprocessor to itself is larger.

Bits: scores decide exactly, and ties go to the lowest position, whatever the launch.
"""

from __future__ import annotations

from math import isqrt
from typing import NamedTuple

import torch

from dsa_engine.kernels.indexer._candidates import candidate_keys
from dsa_engine.kernels.indexer._topk_kernel import select_topk_kernel
from dsa_engine.kernels.indexer._topk_spans_kernel import select_topk_spans_kernel
from dsa_engine.kernels.rows.segment import Paging, slots_of
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import chip_of, config_for, runs_triton
from dsa_engine.kernels.runtime.operation import operation

LARGEST_K = 4096  # the kernels' largest k

# Largest numbers of rows and scores for which the kernel of few rows is the faster one: on an H100 26 us, not 58, for
# 8 rows of 131,072, but 92, not 63, for 64 rows (benchmarks/results/h100).
FEW_ROWS, FEW_SCORES = 32, 1 << 22


class Config(NamedTuple):
    """How the kernel is launched. A chunk is ``128 · warps · groups`` scores."""

    warps: int
    groups: int  # groups of 4 scores that a thread reads at a time: 2, or 4 with at most 4 warps
    piece: int  # candidates worked on at a time
    capacity: int  # candidates held; a multiple of piece; k is at most capacity − piece
    sample: int  # scores that the first guess is made from, in rows at least 4 times as long; 0: no guess
    resident: int  # programs per multiprocessor
    registers: int  # a thread may take

    @property
    def chunk(self) -> int:
        return 128 * self.warps * self.groups

    @property
    def largest_k(self) -> int:
        return self.capacity - self.piece


# Many small programs hide each other's barriers; one that has a multiprocessor to itself takes 16 warps instead.
MANY_ROWS = {
    80: Config(warps=4, groups=4, piece=1024, capacity=6144, sample=4096, resident=4, registers=128),
}
A_ROW_EACH = {
    80: Config(warps=16, groups=2, piece=4096, capacity=16384, sample=4096, resident=1, registers=128),
}


class Spans(NamedTuple):
    """How the kernel of few rows is launched."""

    span: int = 8192  # scores of a program, all in registers; k is at most half of it
    sample: int = 4096  # scores that a floor is found in; at most span
    warps: int = 16


def select_topk_reference(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = scores.shape
    if lengths is not None:
        scores.masked_fill_(torch.arange(width, device=scores.device) >= lengths[:, None], float("-inf"))
    selected = min(k, width)
    top = scores.topk(selected, dim=-1, sorted=False)
    threshold = top.values.amin(dim=-1, keepdim=True)
    positions = top.indices
    # Rows in which more scores equal the threshold than were taken: torch.topk's choice among them is arbitrary.
    taken = (top.values == threshold).sum(dim=-1, dtype=torch.int32)
    tied = ((scores == threshold).count_nonzero(dim=-1) > taken).nonzero().squeeze(-1)
    if tied.numel():
        row, line = scores[tied], threshold[tied]
        equal = row == line
        wanted = (row > line) | (equal & (equal.cumsum(dim=-1, dtype=torch.int32) <= taken[tied, None]))
        positions[tied] = wanted.nonzero()[:, 1].view(-1, selected)
    strange = threshold.squeeze(-1).isnan().nonzero().squeeze(-1)  # rows with NaN, which equals nothing
    if strange.numel():
        positions[strange] = scores[strange].sort(dim=-1, descending=True, stable=True).indices[:, :selected]
    selectable = top.values != float("-inf")
    counts = selectable.sum(dim=-1, dtype=torch.int32)
    if not bool(selectable.all()):
        masked = scores.gather(1, positions) == float("-inf")
        positions = positions.masked_fill(masked, width)
    positions = positions.int().sort(dim=-1).values
    positions = positions.masked_fill(positions == width, -1)
    if selected < k:
        positions = torch.cat((positions, positions.new_full((rows, k - selected), -1)), dim=-1)
    return positions, counts


def select_by_kernel(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None,
    config: Config,
    paging: Paging | None = None,
    out: torch.Tensor | None = None,
    page_index: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`select_topk` by the kernel of many rows; k at most ``config.largest_k``."""
    scores, lengths, (tables, sequences, page_size) = _contiguous(scores, lengths, paging)
    (rows, width), device = scores.shape, scores.device
    programs = min(rows, config.resident * chip_of(scores).multiprocessors)
    staged = 2 * config.chunk + config.piece
    candidates = torch.empty(programs, config.capacity + staged, dtype=torch.float32, device=device)
    columns = torch.empty(programs, config.capacity + staged // 4, dtype=torch.int32, device=device)
    positions = torch.empty(rows, k, dtype=torch.int32, device=device) if out is None else out
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    select_topk_kernel[(programs,)](
        scores, lengths, candidates, columns, positions, counts, tables, sequences, page_index, keys,
        rows, width, scores.stride(0), k, min(config.largest_k, k + k // 4), 0 if tables is None else tables.stride(0),
        0 if page_index is None else page_index.stride(0),
        HAS_LENGTHS=lengths is not None, PAGE_SIZE=page_size, LANES=32 * config.warps, GROUPS=config.groups,
        PIECE=config.piece, CAPACITY=config.capacity, SAMPLE=config.sample,
        num_warps=config.warps, maxnreg=config.registers,
    )  # fmt: skip
    return positions, counts


def _contiguous(
    scores: torch.Tensor, lengths: torch.Tensor | None, paging: Paging | None
) -> tuple[torch.Tensor, torch.Tensor | None, tuple[torch.Tensor | None, torch.Tensor | None, int]]:
    """As the kernels read them."""
    if scores.stride(1) != 1 and scores.shape[1] > 1:
        scores = scores.contiguous()
    if lengths is not None:
        lengths = lengths.contiguous()
    if paging is None:
        return scores, lengths, (None, None, 0)
    return scores, lengths, (paging.block_tables.contiguous(), paging.sequences.contiguous(), paging.page_size)


def takes_spans(rows: int, width: int) -> bool:
    """Whether scores of this shape are those of few rows."""
    return rows <= FEW_ROWS and rows * width <= FEW_SCORES


def no_row_finished(device: torch.device) -> torch.Tensor:
    """Zeros int32, in which the programs of each of few rows are counted. A selection leaves zeros there; selections
    that may run at the same time need their own."""
    return torch.zeros(FEW_ROWS, dtype=torch.int32, device=device)


def select_by_spans(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None,
    config: Spans,
    paging: Paging | None = None,
    out: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    page_index: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`select_topk` by the kernel of few rows; k at most half of a span. ``finished``:
    :func:`no_row_finished`."""
    scores, lengths, (tables, sequences, page_size) = _contiguous(scores, lengths, paging)
    (rows, width), device = scores.shape, scores.device
    spans = cdiv(width, config.span)
    orders, columns = torch.empty(2, rows, spans * config.span // 2, dtype=torch.int32, device=device)
    held = torch.empty(rows, spans, dtype=torch.int32, device=device)
    positions = torch.empty(rows, k, dtype=torch.int32, device=device) if out is None else out
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    select_topk_spans_kernel[(spans, rows)](
        scores, lengths, orders, columns, held,
        torch.zeros(rows, dtype=torch.int32, device=device) if finished is None else finished,
        positions, counts, tables, sequences, page_index, keys, width, scores.stride(0), k, isqrt(k * config.span),
        0 if tables is None else tables.stride(0), 0 if page_index is None else page_index.stride(0),
        HAS_LENGTHS=lengths is not None, PAGE_SIZE=page_size, SPAN=config.span, SAMPLE=config.sample,
        num_warps=config.warps,
    )  # fmt: skip
    return positions, counts


def check_candidates(
    keys: torch.Tensor, page_index: torch.Tensor | None, tables: torch.Tensor | None, rows: int, k: int
) -> None:
    """Raises ``ValueError`` unless ``keys`` can take the candidate keys of so many rows."""
    if tables is None or page_index is None or page_index.shape != tables.shape or page_index.dtype != torch.int32:
        raise ValueError("candidate keys need pages, and a page_index, int32, shaped as their block tables")
    if keys.shape != (rows, k) or keys.dtype != torch.int64 or not keys.is_contiguous():
        raise ValueError(f"keys must be contiguous int64 [{rows}, {k}], not {keys.dtype} {list(keys.shape)}")


@operation(writes=("out", "keys"), waits=True)
def select_topk(
    scores: torch.Tensor,
    k: int,
    lengths: torch.Tensor | None = None,
    *,
    paging: Paging | None = None,
    out: torch.Tensor | None = None,
    finished: torch.Tensor | None = None,
    page_index: torch.Tensor | None = None,
    keys: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best positions of each row of ``scores [R, W]`` (float32), or their slots.

    Args:
        scores: any row stride; columns follow one another.
        k: number of positions to select. The kernel takes up to 4096; beyond, the reference runs.
        lengths: ``[R]`` int32, the number of columns of each row that count; all if not given. The reference overwrites
            the columns after them, the kernel does not.
        paging: the pages of the rows' sequences: slots are the result, as :func:`.segment.slots_of` gives them.
        out: int32 ``[R, k]``, contiguous: gets the positions, or slots; default: a new tensor.
        finished: :func:`no_row_finished`, if it is kept between calls; else it costs a launch with few rows.
        page_index: int32, as the block tables of ``paging``: the number of each page in its sequence, of which others
            lie elsewhere.
        keys: int64 ``[R, k]``, contiguous: gets the candidate keys (:mod:`._candidates`) in the order of the slots, by
            ``page_index``.

    Returns:
        positions ``[R, k]`` int32, ascending, or slots in the same order, −1 after the last; counts ``[R]`` int32, the
        number of selected ones.
    """
    if scores.dim() != 2 or scores.dtype != torch.float32 or scores.shape[1] == 0:
        raise ValueError(f"scores must be float32 [rows, width > 0], not {scores.dtype} {tuple(scores.shape)}")
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
    if lengths is not None and lengths.shape != scores.shape[:1]:
        raise ValueError(f"lengths must be [{scores.shape[0]}], one for each row, not {tuple(lengths.shape)}")
    if paging is not None and paging.sequences.shape != scores.shape[:1]:
        raise ValueError(f"{scores.shape[0]} rows of scores, but {tuple(paging.sequences.shape)} sequence numbers")
    rows, width = scores.shape
    if out is not None and (out.shape != (rows, k) or out.dtype != torch.int32 or not out.is_contiguous()):
        raise ValueError(f"out must be contiguous int32 [{rows}, {k}], not {out.dtype} {list(out.shape)}")
    if page_index is not None:
        page_index = page_index.contiguous()
    if keys is not None:
        check_candidates(keys, page_index, None if paging is None else paging.block_tables, rows, k)
    if not runs_triton(scores) or k > LARGEST_K or not rows:
        selected, counts = select_topk_reference(scores, k, lengths)
        if keys is not None and page_index is not None and paging is not None:
            by_row = page_index.index_select(0, paging.sequences)
            keys.copy_(candidate_keys(scores, selected, by_row, paging.page_size))
        if paging is not None:
            selected = slots_of(selected, *paging)
        return selected if out is None else out.copy_(selected), counts
    if takes_spans(rows, width):
        return select_by_spans(scores, k, lengths, Spans(), paging, out, finished, page_index, keys)
    configs = A_ROW_EACH if rows <= chip_of(scores).multiprocessors else MANY_ROWS
    return select_by_kernel(scores, k, lengths, config_for(configs, chip_of(scores)), paging, out, page_index, keys)
