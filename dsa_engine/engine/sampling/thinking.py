"""``thinking_token_budget``: a thought has at most so many tokens; the token after them ends it.

A request thinks after a token that begins a thought, in its prompt or output, until one that ends it. The host knows
where an open thought began, by the tokens that it has read. Those of the step in flight, and drafts, are looked at on
the device, for each row those before its position: so a thought ends where it would end without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dsa_engine.engine.requests.request import NEVER, Request

_WITHOUT = torch.tensor([NEVER, 0, -2, -2])[:, None]
FIELDS = len(_WITHOUT)


def thoughts_of(requests: Sequence[Request]) -> torch.Tensor:
    """int64 ``[4, n]`` on the host: the position of the token that began an open thought, ``NEVER`` if none is open;
    the budget; the tokens that begin and end thoughts, which no token is for a request without a budget."""
    table = _WITHOUT.repeat(1, len(requests))
    for number, one in enumerate(requests):
        if one.think_tokens is not None:
            values = (begun(one, *one.think_tokens), one.params.thinking_token_budget, *one.think_tokens)
            table[:, number] = torch.tensor(values, dtype=torch.int64)
    return table


def begun(request: Request, begin: int, end: int) -> int:
    """The position of the token that began the thought which is open after the tokens that the host knows, ``NEVER`` if
    none is; ``begin``, ``end``: the tokens that begin and end thoughts."""
    (done, at), known = request.thoughts.get((begin, end), (0, NEVER)), request.num_known_tokens
    ids = np.asarray(request.tokens(done, known - done))
    if len(marks := ((ids == begin) | (ids == end)).nonzero()[0]):
        at = done + int(marks[-1]) if ids[marks[-1]] == begin else NEVER
    request.thoughts[begin, end] = known, at
    return at


def put_ends(
    tokens: torch.Tensor, positions: torch.Tensor, thoughts: torch.Tensor, following: torch.Tensor, at: torch.Tensor
) -> torch.Tensor:
    """The tokens chosen for ``positions [n]``, int64 ``[n]``, with those that end a thought in the place of others;
    always the same launches. ``thoughts``: :func:`thoughts_of` each row; ``following [n, m]``: tokens after those that
    the host knows, negative or ``NEVER`` for none, and ``at [n, m]`` their positions; only those before a row count."""
    begun, budget, begin, end = thoughts
    ended = torch.full_like(at, -1).masked_fill(following == end[:, None], NEVER)
    marks = at.where(following == begin[:, None], ended).masked_fill(at >= positions[:, None], -1)
    marks = torch.cat((begun[:, None], marks), dim=1)
    last = torch.arange(marks.shape[1], device=marks.device).where(marks >= 0, 0).amax(dim=1, keepdim=True)
    return end.where(positions > marks.gather(1, last)[:, 0] + budget, tokens)
