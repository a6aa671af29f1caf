"""Expert parallelism: rank i of the group holds an equal, consecutive part of the routed experts.

A dispatch brings tokens to the ranks that hold their experts; its ``combine`` brings the sums back. Both dispatches
send a token to a rank at most once, however many of that rank's experts it has chosen.

* "all_to_all": only what is needed travels; the counts depend on the routing and cross the host; sums add in float32.
* "all_gather": every rank gets every token; shapes depend on the batch only; sums add in the tokens' dtype, under way.

Where a group plans its routing (`routing.py`), the planned choices take the place of the router's, with its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.parallel.group import Group


class Dispatched(NamedTuple):
    """Tokens at the rank that holds their experts, and the way back.

    ``experts`` counts within this rank's experts, −1 for a choice that lies elsewhere. ``combine`` takes the weighted
    sums of this rank's experts ``[R, hidden]`` and returns the sums over all ranks for this rank's own tokens
    ``[T, hidden]``. ``share`` is which part of the choices is served here where routing is balanced.
    """

    tokens: torch.Tensor  # [R, hidden]
    experts: torch.Tensor  # [R, k] int32
    weights: torch.Tensor  # [R, k] float32
    combine: Callable[[torch.Tensor], torch.Tensor]
    share: float


def _own(experts: torch.Tensor, per_rank: int, rank: int) -> torch.Tensor:
    local = experts - rank * per_rank
    return local.masked_fill((local < 0) | (local >= per_rank), -1)


def dispatch_local(tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> Dispatched:
    """All experts are here: nothing travels."""
    return Dispatched(tokens, experts, weights, lambda sums: sums, 1.0)


def dispatch_all_to_all(
    tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, per_rank: int, group: Group
) -> Dispatched:
    """Sends each of ``tokens [T, hidden]`` to the ranks that hold one of its ``experts [T, k]``.

    Args:
        experts: global expert numbers, int32.
        weights: ``[T, k]`` float32.
        per_rank: experts of one rank.
    """
    planned = group.planned(tokens.shape[0], experts.shape[1], group.size * per_rank, tokens.device)
    if planned is not None:
        experts = planned.own(tokens.shape[0])
    wanted = torch.zeros(group.size, tokens.shape[0], dtype=torch.bool, device=tokens.device)
    owners = (experts // per_rank).long()
    wanted.scatter_(0, owners.t(), True)
    _, source = wanted.nonzero(as_tuple=True)  # by rank, then by token
    counts = wanted.sum(dim=1)
    send = counts.tolist()
    receive = group.all_to_all(counts).tolist()
    chosen = None
    if planned is not None and group.emulated:  # nobody has sent counts and choices
        with group.filling():
            chosen, receive = planned.arriving
    # Choices and weights travel beside each other as 32-bit words, the tokens in their own dtype.
    words = torch.cat((experts[source], weights[source].view(torch.int32)), dim=-1)
    arrived = group.all_to_all(words, send, receive)
    k = experts.shape[1]

    def combine(sums: torch.Tensor) -> torch.Tensor:
        returned = group.all_to_all(sums, receive, send)
        total = torch.zeros(tokens.shape, dtype=torch.float32, device=tokens.device)
        return total.index_add_(0, source, returned.float()).to(tokens.dtype)

    return Dispatched(
        group.all_to_all(tokens[source], send, receive),
        _own(arrived[:, :k] if chosen is None else chosen, per_rank, group.index),
        arrived[:, k:].contiguous().view(torch.float32),
        combine,
        max(1 / k, 1 / group.size),  # a token comes for one choice at least
    )


def dispatch_all_gather(
    tokens: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, per_rank: int, rows: int, group: Group
) -> Dispatched:
    """Gives every rank the tokens of all; ``rows`` is the largest token count of a rank, the rest is padding.

    Padding has no experts, so it takes no part in any expert's work.
    """
    count = tokens.shape[0]
    planned = group.planned(count, experts.shape[1], group.size * per_rank, tokens.device)
    if planned is not None:
        experts = planned.own(tokens.shape[0])
    extra = (0, 0, 0, rows - count)
    words = torch.cat((F.pad(experts, extra, value=-1), F.pad(weights, extra).view(torch.int32)), dim=-1)
    gathered = group.all_gather(words)
    k = experts.shape[1]
    chosen = gathered[:, :k]
    if planned is not None and group.emulated:  # nobody has sent choices
        with group.filling():
            chosen = planned.padded(rows)

    def combine(sums: torch.Tensor) -> torch.Tensor:
        return group.reduce_scatter(sums)[:count]

    return Dispatched(
        group.all_gather(F.pad(tokens, extra)),
        _own(chosen, per_rank, group.index),
        gathered[:, k:].contiguous().view(torch.float32),
        combine,
        1 / group.size,
    )
