"""From logits to tokens: the one chain that chooses all tokens, run eagerly by the sampler and in CUDA graphs by the
drafter, and all drafts (``speculation/draft_sampler.py``).

In this order: biases, forbidden tokens, penalties, the mask of a grammar; then the most likely token, or a draw by
temperature, min-p, top-k and top-p. A new parameter is a bit of ``SamplingParams.asks``, if its step is not for all
draws, a field of :class:`Parameters` and its step here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch

from dsa_engine.engine.requests.samples import NOT_FINITE, NOTHING_LEFT
from dsa_engine.engine.sampling.grammar import masked
from dsa_engine.sampling_params import DRAWS, MIN_P, TOP_P, SamplingParams

# Parameters with which the chain takes the most memory in a graph: every row is drawn from a part of the vocabulary,
# and its request has penalties.
LARGEST = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.5, seed=0)
_INTEGERS = 2  # the first fields of Parameters


class Parameters(NamedTuple):
    """What n rows' parameters are to the chain, ``[n]`` each, on the device."""

    key: torch.Tensor  # int64, made from the request's seed, see `seed_key`
    top_k: torch.Tensor  # int64, 0 for none
    temperature: torch.Tensor  # float32 as all that follow; 0: the most likely token is taken
    log_min_p: torch.Tensor  # -inf for none
    top_p: torch.Tensor  # inf for none
    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor

    @staticmethod
    def pack(params: Sequence[SamplingParams], keys: Sequence[int], vocab: int) -> torch.Tensor:
        """The fields as rows of a table ``[fields, n]`` on the host, int64: float64 values as bits."""
        integers = [(key, p.num_best if p.num_best < vocab else 0) for p, key in zip(params, keys, strict=True)]
        numbers = [
            (
                # At these two bounds the choice is greedy, or uniform.
                min(max(p.temperature, 1e-30), 1e30) if p.temperature else 0.0,
                math.log(p.min_p) if p.min_p else -math.inf,
                max(p.top_p, 1e-30) if p.top_p < 1 else math.inf,
                p.repetition_penalty,
                p.frequency_penalty,
                p.presence_penalty,
            )
            for p in params
        ]
        bits = (
            torch.tensor(numbers, dtype=torch.float64).view(-1, len(Parameters._fields) - _INTEGERS).view(torch.int64)
        )
        return torch.cat((torch.tensor(integers, dtype=torch.int64).view(-1, _INTEGERS), bits), dim=1).T.contiguous()

    @classmethod
    def of(cls, table: torch.Tensor) -> Parameters:
        """From a table of :meth:`pack`, on any device."""
        return cls(*table[:_INTEGERS], *table[_INTEGERS:].view(torch.float64).float())


class Inputs(NamedTuple):
    """What the chain needs besides the logits of n rows; a step whose input is None is left out. The launches depend on
    ``asks``, ``top_k``, the shapes and on what is None, and on nothing else."""

    asks: int = 0  # what any row asks, see `SamplingParams.asks`
    top_k: int = 0  # at least the largest of a row that is drawn; 0: none has any
    table: torch.Tensor | None = None  # see `Parameters.pack`; None: no row is drawn or has penalties
    positions: torch.Tensor | None = None  # int64 [n], of the tokens to draw
    drawn: torch.Tensor | None = None  # int64, the rows to draw; None: all with a temperature
    edit: Callable[[torch.Tensor], object] | None = None  # biases logits and forbids tokens in place
    counts: Callable[[], torch.Tensor] | None = None  # makes int32 [rows with penalties, vocab], see `penalised`
    with_penalties: torch.Tensor | None = None  # int64, these rows; None: all
    masks: torch.Tensor | None = None  # see `masked`
    # Replaces tokens, int64 [n], by likely drafts, by the changed logits.
    put_drafts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    put_ends: Callable[[torch.Tensor], torch.Tensor] | None = None  # replaces tokens by ends of thoughts


def chain(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The next token of each row, int64 ``[n]``, or the code of an error, which concerns that row's request only.
    ``logits``: float32 ``[n, vocab]``; overwritten."""
    broken = not_finite(logits)  # before some become -inf
    logits = changed(logits, inputs)
    tokens = choose(logits, inputs)
    if inputs.edit is not None or inputs.masks is not None:
        nothing_left = logits.gather(1, tokens[:, None])[:, 0] == -math.inf
        tokens.masked_fill_(nothing_left, NOTHING_LEFT)
    if inputs.put_drafts is not None:
        tokens = inputs.put_drafts(logits, tokens)
    if inputs.put_ends is not None:
        tokens = inputs.put_ends(tokens)
    return tokens.masked_fill_(broken, NOT_FINITE)


def choose(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The most likely token of each row of :func:`changed` logits, or its draw: int64 ``[n]``."""
    tokens = logits.argmax(dim=-1)
    if inputs.asks & DRAWS:
        assert inputs.table is not None and inputs.positions is not None
        rows, how = inputs.drawn, (inputs.asks, inputs.top_k)
        if rows is None:
            parameters = Parameters.of(inputs.table)
            drawn = draw(logits, parameters, inputs.positions, *how)
            tokens = drawn.where(parameters.temperature > 0, tokens)
        else:
            tokens[rows] = draw(logits[rows], Parameters.of(inputs.table[:, rows]), inputs.positions[rows], *how)
    return tokens


def changed(logits: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Logits with biases and penalties, -inf for forbidden tokens; the argument may be overwritten."""
    if inputs.edit is not None:
        inputs.edit(logits)
    if inputs.counts is not None:
        assert inputs.table is not None
        rows = inputs.with_penalties
        if rows is None:
            logits = penalised(logits, inputs.counts(), Parameters.of(inputs.table))
        else:
            logits[rows] = penalised(logits[rows], inputs.counts(), Parameters.of(inputs.table[:, rows]))
    return logits if inputs.masks is None else masked(logits, inputs.masks)


def not_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether a row has infinite logits or NaN, bool ``[n]``, in fewer launches than ``isfinite()``."""
    total = logits.sum(dim=-1)  # finite if all of a row are
    return total - total != 0


def penalised(logits: torch.Tensor, counts: torch.Tensor, parameters: Parameters) -> torch.Tensor:
    """Logits, float32 ``[n, vocab]``, after the penalties for repetition. ``counts``: int32 ``[n, vocab]``, 2 ·
    occurrences in the output, + 1 if the prompt has the token."""
    of = parameters
    repetition, frequency, presence = of.repetition[:, None], of.frequency[:, None], of.presence[:, None]
    factor = torch.where(counts > 0, repetition, torch.ones_like(repetition))
    in_output = counts >> 1
    return (
        torch.where(logits > 0, logits / factor, logits * factor) - frequency * in_output - presence * (in_output > 0)
    )


def rounded(asks: int, top_k: int, vocab: int) -> tuple[int, int]:
    """``asks`` and ``top_k`` of :class:`Inputs` with the same effect, of which there are only a few."""
    if not asks & DRAWS:
        return asks, 0
    return asks | MIN_P, next(k for k in (0, 64, 1024, vocab) if min(top_k, vocab) <= k <= vocab)


def draw(logits: torch.Tensor, parameters: Parameters, positions: torch.Tensor, asks: int, top_k: int) -> torch.Tensor:
    """Draws a token for each row, int64 ``[n]``; that of a row without a temperature is void.

    Args:
        logits: float32 ``[n, vocab]``; -inf forbids a token, and each row has an allowed token.
        positions: int64 ``[n]``, position of each token. Seed and position fix the random numbers, so a choice depends
            neither on the batch nor on the rank, and is repeated after a preemption.
    """
    # The highest logit becomes 0, so that no temperature makes it overflow.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= parameters.temperature[:, None]
    if asks & MIN_P:
        scaled.masked_fill_(scaled < parameters.log_min_p[:, None], -math.inf)
    if top_k:
        best = scaled.topk(top_k, dim=-1).values
        last = best.gather(1, parameters.top_k.clamp(min=1)[:, None] - 1)
        scaled.masked_fill_((scaled < last) & (parameters.top_k > 0)[:, None], -math.inf)
    probabilities = scaled.softmax(dim=-1)
    if asks & TOP_P:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while the tokens before it sum to less than top_p, so the first always stays.
        before = ordered.cumsum(dim=-1) - ordered
        ordered.masked_fill_(before >= parameters.top_p[:, None], 0.0)
        probabilities.scatter_(1, order, ordered)
    # Gumbel trick: the largest p / Exp(1) is a sample of p, without the sum that a multinomial draw rounds. A forbidden
    # token (p = 0) never wins: some p is at least 1 / vocab, and the noise is positive and finite.
    return probabilities.div_(exponential_noise(parameters.key, positions, logits.shape[1])).argmax(dim=-1)


def exponential_noise(keys: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Random numbers of the distribution Exp(1), float32 ``[n, count]``, from int64 ``keys [n]`` (:func:`seed_key`) and
    ``positions [n]``. A row is the same on every device up to the rounding of a logarithm. It is the output of
    SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) from a state that its output
    function makes from the key and the position.
    """
    state = _mixed(keys + positions * _signed(0xD1B54A32D192ED03))  # modulo 2^64 throughout
    bits = _mixed(state[:, None] + torch.arange(1, count + 1, device=keys.device) * _signed(0x9E3779B97F4A7C15))
    uniform = ((bits >> 33) & (2**31 - 1)).float().add_(0.5).mul_(2.0**-31)
    return uniform.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """The output function of SplitMix64, in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits ^= (bits >> shift) & (2 ** (64 - shift) - 1)  # a logical shift: no copies of the sign
        bits *= _signed(factor)
    bits ^= (bits >> 31) & (2**33 - 1)
    return bits


def seed_key(seed: int) -> int:
    """A signed 64-bit hash of a seed, the key of its random numbers: neighbouring seeds have nothing in common."""
    return int.from_bytes(blake2b(f"{seed}".encode(), digest_size=8).digest(), "big", signed=True)


def mixed_seed(seed: int, number: int) -> int:
    """The seed of request ``number`` of an engine with this seed: neighbours have nothing in common."""
    return int.from_bytes(blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "big")


def _signed(value: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return value - 2**64 if value >= 2**63 else value
