"""The choice of the next token, and log-probabilities: pure functions of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dsa_engine.kernels.transfer import upload
from dsa_engine.sampling_params import SamplingParams


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Chooses the next token of each row at its temperature above 0; nothing waits for the device.

    Args:
        logits: float32 ``[n, vocab]``; -inf forbids a token, at least one of a row is allowed.
        params: each request's parameters.
        seeds: of the requests.
        positions: of the tokens; with the seed it fixes the random numbers, so that a choice depends neither on the
            batch nor on the rank that makes it, and is the same again after a preemption.

    Returns:
        int64 ``[n]``, on the logits' device.
    """
    vocab, device = logits.shape[1], logits.device

    def column(values: list[float]) -> torch.Tensor:
        return upload(torch.tensor(values, dtype=torch.float32)[:, None], device)

    # The most likely token lies at 0, so that no temperature makes it overflow.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= column([max(p.temperature, 1e-30) for p in params])
    if any(p.min_p > 0 for p in params):
        scaled.masked_fill_(scaled < column([math.log(p.min_p) if p.min_p else -math.inf for p in params]), -math.inf)
    counts = [p.top_k if 0 < p.top_k < vocab else 0 for p in params]
    if any(counts):
        best = scaled.topk(max(counts), dim=-1).values
        last = upload(torch.tensor([max(k, 1) - 1 for k in counts])[:, None], device)
        limited = upload(torch.tensor(counts)[:, None] > 0, device)
        scaled.masked_fill_((scaled < best.gather(1, last)) & limited, -math.inf)
    probabilities = scaled.softmax(dim=-1)
    if any(p.top_p < 1 for p in params):
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while those before it have less than top_p together, so at least one does.
        before = ordered.cumsum(dim=-1) - ordered
        ordered.masked_fill_(before >= column([p.top_p if p.top_p < 1 else math.inf for p in params]), 0.0)
        probabilities.scatter_(1, order, ordered)
    # Gumbel trick: the largest p / Exp(1) is a sample of p, without the sum that a multinomial draw rounds.
    noise = torch.empty_like(probabilities)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        row.exponential_(generator=torch.Generator(device).manual_seed((seed * 1_000_003 + position) % 2**63))
    return probabilities.div_(noise).argmax(dim=-1)


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: float32 ``[n, vocab]``.
        tokens: int64 ``[n]``.
        most: how many of the most likely tokens.

    Returns:
        float64 ``[n, 1 + 2 * most]``, exact for any token id: the log-probability of the token; the ids of the most
        likely tokens, most likely first; their log-probabilities.
    """
    of_all = logits.log_softmax(dim=-1)
    best, ids = of_all.topk(most, dim=-1)
    return torch.cat((of_all.gather(1, tokens[:, None]).double(), ids.double(), best.double()), dim=1)
