"""Context parallelism by one all-gather of cache rows, the engine's way (``model/attention.py``), and by Ulysses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from context_parallel.layer import CpLayout, Division, Layer, Size, Tokens
from dsa_engine.parallel.group import Group


class HeadTail:
    """Rank r has the pieces r and ``2 · ranks − 1 − r`` of ``2 · ranks``: the same causal work on all ranks.

    Each rank gets all latent rows and index keys, packed side by side, and computes all heads of its own tokens. The
    gather is issued first and overlaps with work on local tokens.
    """

    layout: CpLayout = "head_tail"

    def __init__(self, layer: Layer, group: Group):
        self.layer, self.group = layer, group

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        """``[T, heads, value]`` of this rank's tokens; every rank calls it."""
        gathering = self.group.all_gather_async(padded(tokens.cache_rows, division.rows))
        q = self.layer.absorb(tokens.q)
        latent, slots = self.cache_and_slots(division, tokens, gathering())
        return self.layer.values(self.layer.attend(q, latent, slots)[0])

    def cache_and_slots(
        self, division: Division, tokens: Tokens, gathered: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of latent rows, and what this rank's tokens select, from gathered rows ``[ranks * rows, width]``."""
        positions = torch.cat([padded(part, division.rows, -1) for part in division.positions])
        latent, keys = self.layer.cache(gathered, positions)
        return latent, self.layer.select(tokens, division.positions[self.group.index], keys)

    @classmethod
    def work(cls, division: Division, size: Size) -> list[float]:
        """Counted operations of each rank."""
        return [division.work(rank, size) for rank in range(division.ranks)]


class Contiguous(HeadTail):
    """The same with one contiguous piece per rank: the tokens of the last rank see the most."""

    layout: CpLayout = "contiguous"


class Ulysses(HeadTail):
    """Tokens are divided outside of the attention and heads within it, by all-to-all (DeepSpeed, 2023).

    MLA has one latent row for all heads, so every rank still needs all rows, by the gather. DSA selects once for all
    heads of a token. So each rank selects for its own tokens, and every selection is sent to every rank: ``topk``
    numbers of 4 bytes, more than the token's cache row. Queries are sent before W_UK is absorbed, results after W_UV.
    """

    def __init__(self, layer: Layer, group: Group):
        super().__init__(layer, group)
        each, rest = divmod(layer.size.heads, group.size)
        if rest:
            raise ValueError(
                f"ulysses divides heads: {layer.size.heads} heads cannot be divided evenly over {group.size} ranks; "
                "start another number of ranks, or name other --forms"
            )
        self._heads = slice(group.index * each, (group.index + 1) * each)
        self._over_ranks = None if group.alone else sequence_layer(group, layer.device)

    def run(self, division: Division, tokens: Tokens) -> torch.Tensor:
        gathering = self.group.all_gather_async(padded(tokens.cache_rows, division.rows))
        latent, own = self.cache_and_slots(division, tokens, gathering())
        slots = self.group.all_gather(padded(own, division.rows, -1))

        def some_heads(q: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
            """``[ranks * rows, 1, heads / ranks, nope + rope]``, of all tokens, to the same with ``value`` columns."""
            out, _lse = self.layer.attend(self.layer.absorb(q[:, 0], self._heads), latent, slots)
            return self.layer.values(out, self._heads)[:, None]

        q = padded(tokens.q, division.rows)[:, None]
        if self._over_ranks is None:
            return some_heads(q)[:, 0]
        nothing = q[..., :0]  # keys and values have been sent as latent rows
        return self._over_ranks(some_heads)(q, nothing, nothing, 1)[: len(tokens.q), 0]

    @classmethod
    def work(cls, division: Division, size: Size) -> list[float]:
        """Scores of its own tokens, and some heads of all tokens."""
        no_attention = size._replace(heads=0)
        scores = [division.work(rank, no_attention) for rank in range(division.ranks)]
        attention = sum(division.work(rank, size) for rank in range(division.ranks)) - sum(scores)
        return [own + attention / division.ranks for own in scores]


def padded(rows: torch.Tensor, count: int, value: float = 0) -> torch.Tensor:
    """``rows [T, ...]`` with padding after them: ``[count, ...]``."""
    return torch.cat((rows, rows.new_full((count - len(rows), *rows.shape[1:]), value)))


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
    backend = "nccl" if device.type == "cuda" else "gloo"  # it takes the existing process group
    deepspeed.comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return lambda attention: DistributedAttention(attention, group.handle, scatter_idx=2, gather_idx=0)
