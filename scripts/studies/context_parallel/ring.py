"""A ring: blocks of cache rows are sent from neighbour to neighbour, and no rank holds more than two of them.

Ring attention needs each block once, as softmax can be merged. A selection cannot: it is final only after the last key
has been scored. So the ring runs twice. In the first pass index keys arrive, and each query keeps its best ``topk``
scores so far. In the second pass latent rows arrive, and each query attends to its selected tokens in the block. Parts
are merged by their log-sum-exp.

Instead of the second pass a rank could request its selected rows from their owners. That is cheaper for few queries, as
in decode. In prefill a rank's queries select almost every row many times (length · topk / ranks selections among length
rows): the rank would request all rows, and send their indices in addition.

The division is head-tail: a rank scores equally many pairs with each block, and no rank waits for a neighbour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from context_parallel.division import Division
from context_parallel.form import CPForm, to_next
from context_parallel.layer import DSASize, Tokens
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.indexer.topk import select_topk
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.parallel.collective_log import Collective

# The kernels take causal segments. Queries that see a whole piece are computed in groups of this size, as a segment
# whose first query sees the piece; the scores of up to 63 rows after it, which the others see too, are cut off.
_QUERIES = 64


@dataclass(frozen=True)
class Piece:
    """Consecutive positions of a block, and their first row in it."""

    start: int
    count: int
    row: int


class Ring(CPForm):
    name = "ring"

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        latent = self.layer.size.latent
        selected = self._select(division, tokens, tokens.cache_rows[:, latent:])
        return self.layer.values(self._attend(division, tokens, tokens.cache_rows[:, :latent], selected))

    def _blocks(self, division: Division, own: torch.Tensor) -> Iterator[tuple[list[Piece], torch.Tensor]]:
        """Every rank's rows ``[rows + _QUERIES, width]``, this rank's first, each with the pieces in it. The next block
        is sent during the work on one."""
        index, size = self.group.index, self.group.size
        here, coming = (own.new_zeros(division.rows + _QUERIES, own.shape[1]) for _ in range(2))
        here[: len(own)] = own
        for step in range(size):
            source = (index - step) % size
            moving = self._pass_on(here[: division.rows], coming[: division.rows]) if step < size - 1 else []
            if division.segments[source]:
                yield _pieces(division.segments[source]), here
            for work in moving:
                work.wait()
            here, coming = coming, here

    def _pass_on(self, here: torch.Tensor, coming: torch.Tensor) -> list[dist.Work]:
        index, size, handle = self.group.index, self.group.size, self.group.handle
        return dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, here, group=handle, group_peer=(index + 1) % size),
                dist.P2POp(dist.irecv, coming, group=handle, group_peer=(index - 1) % size),
            ]
        )

    def _select(self, division: Division, tokens: Tokens, keys: torch.Tensor) -> torch.Tensor:
        """First pass: positions ``[T, topk]`` int32 of the best scores, ascending, ``length`` after the last."""
        count, k = len(tokens.q), self.layer.size.topk
        scores = torch.full((count, k), float("-inf"), device=keys.device)
        positions = torch.full((count, k), division.length, dtype=torch.int32, device=keys.device)
        for pieces, block in self._blocks(division, keys):
            of_column = torch.cat([torch.arange(p.start, p.start + p.count, dtype=torch.int32) for p in pieces])
            of_column = of_column.to(keys.device)
            max_rows = max(1, self.layer.workspace // 4 // (4 * (k + len(of_column))))
            for part, start in _parts(division.segments[self.group.index], max_rows):
                new = self._scores(tokens, part, start, pieces, block)
                _keep_best(scores[part], positions[part], new, of_column, division.length)
        return positions.sort(dim=-1).values

    def _scores(
        self, tokens: Tokens, part: slice, start: int, pieces: list[Piece], block: torch.Tensor
    ) -> torch.Tensor:
        """Scores ``[n, columns]`` of the tokens ``part``, at positions ``start …``, over a block; −inf for keys that a
        token does not see."""
        q, weights = tokens.index_q[part], tokens.index_weights[part]
        scores = torch.full((len(q), sum(p.count for p in pieces)), float("-inf"), device=q.device)
        column = 0
        for piece in pieces:
            if piece.start < start + len(q):
                seen = _segments(start, len(q), piece, q.device)
                table = torch.arange(piece.row, piece.row + piece.count + _QUERIES, dtype=torch.int32, device=q.device)
                block_scores = indexer_scores(
                    q,
                    weights,
                    block[:, None],
                    table[None],
                    seen,
                    key_format=self.layer.key_format,
                    workspace=self.layer.workspace // 2,
                )[:, : piece.count]
                visible = torch.arange(block_scores.shape[1], device=q.device) < seen.visible[:, None]
                scores[:, column : column + block_scores.shape[1]] = block_scores.masked_fill(~visible, float("-inf"))
                self.count_scored(visible)
            column += piece.count
        return scores

    def _attend(self, division: Division, tokens: Tokens, latent: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Second pass: ``[T, heads, kv_rank]``, the tokens' attention to their selection."""
        mla, q = self.layer.size.mla, self.layer.absorb(tokens.q)
        out = torch.zeros(*q.shape[:2], mla.kv_rank, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        for pieces, block in self._blocks(division, latent):
            for part, start in _parts(division.segments[self.group.index], len(q)):
                for piece in pieces:
                    if piece.start >= start + part.stop - part.start:
                        continue  # later positions
                    slots = _slots(selected[part], piece)
                    if slots.shape[1]:
                        self.count_attended(slots, mla.heads)
                        more = sparse_attention(
                            q[part], block[:, None], slots, row_format=self.layer.latent_format, scale=mla.scale,
                            workspace=self.layer.workspace,
                        )  # fmt: skip
                        _merge(out[part], lse[part], *more)
        return out.to(q.dtype)

    @classmethod
    def collectives(cls, size: DSASize, division: Division, itemsize: int) -> list[Collective]:
        """One message per block to the next rank: index keys, then latent rows."""
        ranks = division.ranks
        return [
            to_next(ranks, division.rows * width * itemsize)
            for width in (size.index_dim, size.latent)
            for _ in range(ranks - 1)
        ]

    @classmethod
    def exposed(cls, communication: list[float], index: float, attention: float, before: float) -> float:
        """A block is sent during the work on the previous one."""
        half = len(communication) // 2
        return sum(max(0.0, key - index / (half + 1)) for key in communication[:half]) + sum(
            max(0.0, latent - attention / (half + 1)) for latent in communication[half:]
        )

    @classmethod
    def held_bytes(cls, size: DSASize, division: Division, itemsize: int) -> int:
        """Bytes of two blocks of latent rows, and of the best scores so far with their positions."""
        blocks = 2 * (division.rows + _QUERIES) * size.latent * itemsize
        return blocks + division.rows * size.topk * (4 + 4)


def _pieces(segments: list[tuple[int, int]]) -> list[Piece]:
    row, pieces = 0, []
    for start, count in segments:
        pieces.append(Piece(start, count, row))
        row += count
    return pieces


def _parts(segments: list[tuple[int, int]], max_rows: int) -> Iterator[tuple[slice, int]]:
    """Parts of a rank's rows: at most ``max_rows`` rows of one segment, with the position of the first."""
    row = 0
    for start, count in segments:
        for done in range(0, count, max_rows):
            yield slice(row + done, row + min(done + max_rows, count)), start + done
        row += count


def _segments(start: int, count: int, piece: Piece, device: torch.device) -> Segments:
    """Segments of the tokens ``start … start+count-1`` over their own piece or an earlier one."""
    if start < piece.start + piece.count:
        return Segments.of([Segment(0, count, 0, start - piece.start)], device)
    whole = (Segment(i, min(_QUERIES, count - i), 0, piece.count - 1) for i in range(0, count, _QUERIES))
    return Segments.of(whole, device)


def _keep_best(
    scores: torch.Tensor, positions: torch.Tensor, new: torch.Tensor, of_column: torch.Tensor, none: int
) -> None:
    """Stores the best of ``scores [n, k]`` and ``new [n, columns]`` in ``scores``, with their positions; ``none`` and
    −inf if there are fewer than k."""
    n, k = scores.shape
    both = torch.cat((scores, new), dim=1)
    positions_of_both = torch.cat((positions, of_column.expand(n, -1)), dim=1)
    chosen = select_topk(both, k)[0].long()
    missing = chosen < 0
    chosen.clamp_(min=0)
    torch.gather(both, 1, chosen, out=scores).masked_fill_(missing, float("-inf"))
    torch.gather(positions_of_both, 1, chosen, out=positions).masked_fill_(missing, none)


def _slots(selected: torch.Tensor, piece: Piece) -> torch.Tensor:
    """Rows in the block of a piece's selected positions: int32 ``[n, maximum selected by a token]``, −1 after a token's
    last. ``selected`` ascends, so they are consecutive in it."""
    borders = selected.new_tensor([piece.start, piece.start + piece.count]).expand(len(selected), 2).contiguous()
    first, end = torch.searchsorted(selected, borders).unbind(1)
    width = int((end - first).max())
    column = first[:, None] + torch.arange(width, device=selected.device)
    slots = selected.gather(1, column.clamp(max=selected.shape[1] - 1)) + (piece.row - piece.start)
    return slots.masked_fill(column >= end[:, None], -1)


def _merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Adds attention over other rows, by their log-sum-exp; −inf: no rows."""
    both = torch.logaddexp(lse, more_lse)
    top = both.masked_fill(both == float("-inf"), 0.0)
    out.mul_((lse - top).exp()[..., None]).addcmul_(more.float(), (more_lse - top).exp()[..., None])
    lse.copy_(both)
