"""Local tensor parallelism: embedding, output projection and LM head divided over the neighbours of a node.

The ranks of the group hold different tokens (they are context- or data-parallel), so each operation gathers the group's
tokens, multiplies them by its shard, and returns every rank its own tokens. ``rows`` is the largest token count of a
rank of the group, the same on all of them.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from dsa_engine.kernels.linear.linear import linear
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.group import Group


def shard(size: int, group: Group, what: str) -> tuple[int, int]:
    """First and last + 1 of this rank's equal part of ``size``; ``ValueError`` if the group does not divide it."""
    if size % group.size:
        raise ValueError(f"{what} {size} cannot be divided over {group.size} ranks; choose a tp_size that divides it")
    part = size // group.size
    return group.index * part, (group.index + 1) * part


def head_group(group: Group, batch_invariant: bool) -> Group:
    """The group that shards heads; this rank alone with ``batch_invariant``, as a sum over ranks adds by their
    number."""
    return Group((0,), 0, None) if batch_invariant else group


def vocab_shard(vocab: int, group: Group) -> tuple[tuple[int, int], int]:
    """First and last + 1 token of this rank's part of the vocabulary, and the rows of its tables: as many on every rank
    of the group, so the last tables end with padding, or are padding alone."""
    rows = cdiv(vocab, group.size)
    first, last = (min(i * rows, vocab) for i in (group.index, group.index + 1))
    return (first, last), rows


def vocab_parallel_embedding(ids: torch.Tensor, weight: torch.Tensor, group: Group) -> torch.Tensor:
    """Embeddings of this rank's tokens, ``[rows, hidden]``: every rank looks up all ranks' tokens, ``ids [size, rows]``
    int64, in its shard of the table, ``weight [vocab / size, hidden]``, and one reduce-scatter sums the results."""
    if group.size == 1:
        return F.embedding(ids[0], weight)
    local = ids.flatten() - group.index * weight.shape[0]
    foreign = (local < 0) | (local >= weight.shape[0])
    partial = F.embedding(local.masked_fill(foreign, 0), weight).masked_fill_(foreign[:, None], 0)
    return group.reduce_scatter(partial)


class Projection(Protocol):
    """A linear layer, of which this rank holds some columns."""

    scales_whole_rows: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def forward_sharded(self, x: torch.Tensor, row_absmax: torch.Tensor) -> torch.Tensor: ...


def head_parallel_projection(heads: torch.Tensor, project: Projection, rows: int, group: Group) -> torch.Tensor:
    """Output projection sharded by heads, ``[T, heads, dim] -> [T, hidden]``: all-to-all from tokens to heads, product,
    reduce-scatter to tokens. ``project``: ``[n, heads / size · dim] -> [n, hidden]``, by this rank's columns of the
    weight. If it quantises a row by its largest magnitude, it gets that of the whole row, so that results do not depend
    on the group."""
    if group.size == 1:
        return project(heads.flatten(1))
    count = heads.shape[0]
    padded = F.pad(heads, (0, 0, 0, 0, 0, rows - count)) if count < rows else heads
    by_rank = padded.view(rows, group.size, -1).transpose(0, 1)  # [size, rows, heads / size · dim]
    mine = group.all_to_all(by_rank.reshape(group.size * rows, -1))  # all tokens, this rank's heads
    if not project.scales_whole_rows:
        return group.reduce_scatter(project(mine))[:count]
    row_absmax = group.all_gather(padded.flatten(1).abs().amax(dim=1).float())
    return group.reduce_scatter(project.forward_sharded(mine, row_absmax))[:count]


def vocab_parallel_logits(hidden: torch.Tensor, weight: torch.Tensor, vocab: int, group: Group) -> torch.Tensor:
    """float32 logits ``[n, vocab]`` of rows ``hidden [n, hidden]`` that every rank of the group holds, by each rank's
    shard ``weight [vocab / size, hidden]``."""
    return _side_by_side(group.all_gather(linear(hidden, weight).float()), vocab, group)


def own_vocab_parallel_logits(gathered: torch.Tensor, weight: torch.Tensor, vocab: int, group: Group) -> torch.Tensor:
    """float32 logits ``[n, vocab]`` of this rank's rows only, out of ``gathered [size · n, hidden]``, the n rows of
    every rank, in rank order: an all-to-all moves a part of ``1 / size`` of what an all-gather would."""
    return _side_by_side(group.all_to_all(linear(gathered, weight).float()), vocab, group)


def _side_by_side(shards: torch.Tensor, vocab: int, group: Group) -> torch.Tensor:
    """``[n, vocab]`` of the parts ``[size · n, vocab / size]`` of the group's ranks, without those of padding."""
    joined = shards.view(group.size, len(shards) // group.size, -1).transpose(0, 1).flatten(1)
    return joined[:, :vocab].contiguous()
