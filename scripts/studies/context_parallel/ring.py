"""A ring: blocks of cache rows are sent from neighbour to neighbour, and no rank holds more than two of them.

Ring attention needs each block once, as softmax can be merged. A selection cannot: it is final only after the last key
has been scored. So the ring runs twice. In the first pass index keys arrive, and each query keeps its best ``topk``
scores so far. In the second pass latent rows arrive, and each query attends to its selected tokens in the block. Parts
are merged by their log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from context_parallel.forms import HeadTail, padded
from context_parallel.layer import WORKSPACE, Division, Tokens


class Ring(HeadTail):
    """Head-tail, so that a rank scores equally many pairs with each block, and no rank waits for a neighbour."""

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        latent = self.layer.size.latent
        selected = self._select(division, tokens, tokens.cache_rows[:, latent:])
        return self.layer.values(self._attend(division, tokens, tokens.cache_rows[:, :latent], selected))

    def _blocks(self, division: Division, own: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every rank's rows ``[n, width]``, this rank's first, each with the rows' positions ``[n]``. The next block is
        sent during the work on one."""
        index, size, handle = self.group.index, self.group.size, self.group.handle
        here = padded(own, division.rows).contiguous()
        coming = torch.empty_like(here)
        for step in range(size):
            moving = []
            if step < size - 1:
                send = dist.P2POp(dist.isend, here, group=handle, group_peer=(index + 1) % size)
                receive = dist.P2POp(dist.irecv, coming, group=handle, group_peer=(index - 1) % size)
                moving = dist.batch_isend_irecv([send, receive])
            positions = division.positions[(index - step) % size].to(own.device)
            if len(positions):
                yield positions, here[: len(positions)]
            for work in moving:
                work.wait()
            here, coming = coming, here

    def _select(self, division: Division, tokens: Tokens, keys: torch.Tensor) -> torch.Tensor:
        """First pass: positions ``[T, topk]`` of the best scores; ``length`` where there are fewer."""
        own = division.positions[self.group.index].to(keys.device)
        scores = torch.full((len(own), self.layer.size.topk), float("-inf"), device=keys.device)
        best = torch.full_like(scores, division.length, dtype=torch.long)
        for positions, block in self._blocks(division, keys):
            rows = min(256, max(1, WORKSPACE // (4 * len(positions) * self.layer.size.index_heads)))
            for first in range(0, len(own), rows):
                part = slice(first, first + rows)
                seen = positions[: int((positions <= own[part][-1]).sum())]
                products = (tokens.index_q[part] @ block[: len(seen)].t()).float().relu_()  # [rows, index_heads, seen]
                new = (tokens.index_weights[part, None] @ products)[:, 0]
                new = new.masked_fill_(seen > own[part, None], float("-inf"))
                both = torch.cat((scores[part], new), dim=1)
                scores[part], chosen = both.topk(scores.shape[1], dim=1)
                candidates = torch.cat((best[part], seen.expand(len(new), -1)), dim=1)
                best[part] = candidates.gather(1, chosen)
        return best.masked_fill_(scores == float("-inf"), division.length)

    def _attend(self, division: Division, tokens: Tokens, latent: torch.Tensor, selected: torch.Tensor) -> torch.Tensor:
        """Second pass: ``[T, heads, kv_rank]``, the tokens' attention to their selection."""
        q = self.layer.absorb(tokens.q)
        out = torch.zeros(*q.shape[:2], self.layer.size.kv_rank, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        for positions, block in self._blocks(division, latent):
            row_at = torch.full((division.length + 1,), -1, dtype=torch.int32, device=q.device)
            row_at[positions] = torch.arange(len(positions), dtype=torch.int32, device=q.device)
            slots = row_at[selected].sort(dim=1, descending=True).values  # -1: not in this block
            width = int((slots >= 0).sum(dim=1).max()) if len(slots) else 0
            if width:
                merge(out, lse, *self.layer.attend(q, block[:, None], slots[:, :width].contiguous()))
        return out.to(q.dtype)


def merge(out: torch.Tensor, lse: torch.Tensor, more: torch.Tensor, more_lse: torch.Tensor) -> None:
    """Adds attention over other rows, by their log-sum-exp; −inf: no rows."""
    both = torch.logaddexp(lse, more_lse)
    top = both.masked_fill(both == float("-inf"), 0.0)
    out.mul_((lse - top).exp()[..., None]).addcmul_(more.float(), (more_lse - top).exp()[..., None])
    lse.copy_(both)
