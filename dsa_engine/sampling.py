"""Sampling parameters, the choice of the next token, and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsa_engine.kernels.transfer import upload


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request; names and meanings as in vLLM.

    Attributes:
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_p: sample from the most likely tokens that together have this probability, in (0, 1].
        top_k: sample from this many most likely tokens; 0 or -1 for all.
        min_p: sample from tokens that are at least this many times as likely as the most likely one, in [0, 1]; comes
            before top_k, and top_k before top_p.
        max_tokens: at most this many tokens are generated.
        min_tokens: no end-of-sequence token, stop token or stop string before this many.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: go on after an end-of-sequence token.
        seed: makes the request reproducible whatever else is in the batch; default: from the engine's seed.
        logprobs: return the log-probabilities of this many most likely tokens and of the sampled one, for each output
            token; 0 for the sampled one alone, None for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, (list, tuple)) or (name == "stop" and isinstance(value, str))):
                kinds = "a string or a list" if name == "stop" else "a list"
                raise ValueError(f"{name} must be {kinds}, not {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop_strings", stop)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value!r}")
        for name in ("top_k", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (all tokens) or positive, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must lie in 0 … max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be non-empty strings, not {self.stop!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        asked = self.logprobs
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 0):
            raise ValueError(f"logprobs must be None, 0 (the sampled token) or a number of tokens, not {asked!r}")
        if not all(isinstance(t, int) and 0 <= t < 2**31 for t in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")


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
