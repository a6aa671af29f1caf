"""Ulysses (DeepSpeed, 2023): tokens are divided outside of the attention and heads within it, by all-to-all.

MLA has one latent row for all heads, so keys and values cannot be divided: every rank needs all rows, by the gather of
:mod:`.gathered`. DSA selects once for all heads of a token, from a sum over all index heads; dividing those would mean
adding S² partial scores. So each rank selects for its own tokens, and as every rank computes some heads of all tokens,
every selection is sent to every rank: ``topk`` numbers of 4 bytes, more than the token's cache row. Queries are sent
before W_UK is absorbed and results after W_UV, where they are narrowest; a rank needs these weights for its heads only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from context_parallel.division import Division
from context_parallel.form import PairCounts, padded, to_all
from context_parallel.gathered import HeadTail
from context_parallel.layer import DSASize, Layer, Tokens
from dsa_engine.parallel.collective_log import Collective
from dsa_engine.parallel.group import Group


class Ulysses(HeadTail):
    """Head-tail division, so that the indexer has equal work on every rank; attention has that in any layout."""

    name = "ulysses"

    def __init__(self, layer: Layer, group: Group):
        super().__init__(layer, group)
        each = layer.size.mla.heads // group.size
        self._heads = slice(group.index * each, (group.index + 1) * each)
        self._over_ranks = None if group.alone else sequence_layer(group, layer.device)

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        gathering = self.group.all_gather_async(padded(tokens.cache_rows, division.rows))
        cache = self.cache(division, gathering())
        own = self.select(division, tokens, cache)
        slots = self.group.all_gather(padded(own, division.rows, -1))

        def some_heads(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            """``[ranks * rows, 1, heads / ranks, nope + rope]``, of all tokens, to the same with ``value`` columns."""
            absorbed = self.layer.absorb(q[:, 0], self._heads)
            return self.layer.values(self.attend(absorbed, cache.latent, slots), self._heads)[:, None]

        q = padded(tokens.q, division.rows)[:, None]
        if self._over_ranks is None:
            return some_heads(q)[:, 0]
        # Keys and values without columns: their content has been sent as latent rows.
        nothing = q[..., :0]
        return self._over_ranks(some_heads)(q, nothing, nothing, 1)[: len(tokens.q), 0]

    @classmethod
    def collectives(cls, size: DSASize, division: Division, itemsize: int) -> list[Collective]:
        ranks, rows, mla = division.ranks, division.rows, size.mla
        some_heads = rows * mla.heads // ranks * itemsize
        return [
            *super().collectives(size, division, itemsize),
            to_all("all_gather", ranks, rows * size.topk * 4),
            to_all("all_to_all", ranks, some_heads * (mla.nope + mla.rope)),
            to_all("all_to_all", ranks, some_heads * mla.value),
        ]

    @classmethod
    def work_of(cls, size: DSASize, division: Division, rank: int) -> PairCounts:
        """Pairs of a rank: it scores for its own tokens, and computes some heads of all tokens."""
        of_all = sum(division.attended(r, size.topk) for r in range(division.ranks))
        return PairCounts(division.scored(rank), of_all * (size.mla.heads // division.ranks))

    @classmethod
    def held_bytes(cls, size: DSASize, division: Division, itemsize: int) -> int:
        """Bytes of every token's cache row and selection."""
        return (division.length * size.cache_row) * itemsize + division.ranks * division.rows * size.topk * 4

    @classmethod
    def refusal(cls, size: DSASize, ranks: int) -> str | None:
        if size.mla.heads % ranks == 0:
            return None
        return (
            f"ulysses divides heads, and {size.mla.heads} heads cannot be divided evenly over {ranks} ranks; start a "
            "number of ranks that divides them, or name other --forms"
        )


def sequence_layer(group: Group, device: torch.device) -> Callable[[Callable[..., torch.Tensor]], Any]:
    """DeepSpeed's ``DistributedAttention`` over a group, for any attention function.

    Raises:
        ValueError: DeepSpeed is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)  # otherwise it searches for every known device, and warns
    try:
        import deepspeed
        from deepspeed.sequence.layer import DistributedAttention
    except ImportError as error:
        raise ValueError(
            "ulysses runs through DeepSpeed's sequence layer, and DeepSpeed is not installed; install it with: "
            "pip install --no-build-isolation 'dsa-engine[deepspeed]', or name other --forms"
        ) from error
    # On a CPU it would first compile an all-reduce in C++ for minutes, which is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It uses the existing process group.
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return lambda attention: DistributedAttention(attention, group.handle, scatter_idx=2, gather_idx=0)
