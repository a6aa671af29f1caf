"""The choice of the next token, and log-probabilities: pure functions of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import torch

from dsa_engine.kernels.transfer import upload
from dsa_engine.outputs import Logprob, Logprobs
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
    # Beyond these two bounds nothing changes any more: the choice is greedy, or uniform.
    scaled /= column([min(max(p.temperature, 1e-30), 1e30) for p in params])
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
        left = [max(p.top_p, 1e-30) if p.top_p < 1 else math.inf for p in params]
        ordered.masked_fill_(before >= column(left), 0.0)
        probabilities.scatter_(1, order, ordered)
    # Gumbel trick: the largest p / Exp(1) is a sample of p, without the sum that a multinomial draw rounds. What is
    # forbidden (p = 0) never wins: some p is at least 1 / vocab, and the noise is positive and finite.
    return probabilities.div_(exponential_noise(seeds, positions, vocab, device)).argmax(dim=-1)


def exponential_noise(
    seeds: Sequence[int], positions: Sequence[int], vocab: int, device: torch.device | str
) -> torch.Tensor:
    """Random numbers of the distribution Exp(1), float32 ``[n, vocab]``, all rows at once.

    A row depends on its seed and position alone, and is the same on every device up to the rounding of a logarithm:
    it is a run of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) from there.
    """
    keys = [_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    state = upload(torch.tensor(keys, dtype=torch.int64)[:, None], device)
    bits = state + torch.arange(1, vocab + 1, device=device) * _signed(0x9E3779B97F4A7C15)  # modulo 2^64 throughout
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= (bits >> shift) & (2 ** (64 - shift) - 1)  # no copies of the sign
        bits *= _signed(factor)
    bits ^= (bits >> 31) & (2**33 - 1)
    uniform = ((bits >> 33) & (2**31 - 1)).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _key(seed: int, position: int) -> int:
    """Signed 64 bits: neighbouring seeds and positions have nothing in common."""
    return int.from_bytes(blake2b(f"{seed} {position}".encode(), digest_size=8).digest(), "big", signed=True)


def _signed(value: int) -> int:
    """The signed 64-bit integer of the same bits."""
    return value - 2**64 if value >= 2**63 else value


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, most: int) -> torch.Tensor:
    """Log-probabilities of given tokens and of the most likely ones.

    Args:
        logits: float32 ``[n, vocab]``.
        tokens: int64 ``[n]``.
        most: how many of the most likely tokens.

    Returns:
        float64 ``[n, 2 + 2 * most]``, exact for any token id: the log-probability of the token; its rank, how many
        tokens are at least as likely; the ids of the most likely tokens, most likely first; their log-probabilities.
    """
    of_all = logits.log_softmax(dim=-1)
    best, ids = of_all.topk(most, dim=-1)
    own = of_all.gather(1, tokens[:, None])
    rank = (of_all >= own).sum(dim=-1, keepdim=True)
    return torch.cat((own.double(), rank.double(), ids.double(), best.double()), dim=1)


def ranked(token: int, row: list[float], count: int) -> Logprobs:
    """A row of :func:`log_probabilities` by token id: the ``count`` most likely tokens, and the sampled one."""
    logprob, rank, *best = row
    most = len(best) // 2
    found = {int(best[i]): Logprob(best[most + i], i + 1) for i in range(min(count, most))}
    found.setdefault(token, Logprob(logprob, int(rank)))
    return found
