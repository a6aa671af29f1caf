"""From a step's logits to the next tokens of all ranks' requests, which stay on the device until they are read.

`logits_processors.py` changes logits (penalties, biases); :func:`draw` draws by temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch
import torch.nn.functional as F

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.samples import NOT_FINITE, NOTHING_LEFT, StepResult
from dsa_engine.engine.sampling.grammar import GrammarMasks, masked
from dsa_engine.engine.sampling.logits_processors import LogitsProcessors
from dsa_engine.engine.steps.plan import StepPlan, Wanted
from dsa_engine.kernels.runtime.transfer import to_host, upload
from dsa_engine.parallel import Mesh
from dsa_engine.sampling_params import SamplingParams

# Replaces chosen tokens by likely drafts: called with the rows' requests and positions, logits and chosen tokens.
PutDrafts = Callable[[Sequence[Wanted], torch.Tensor, torch.Tensor], torch.Tensor]


class Sampler:
    """Chooses tokens and exchanges them between the ranks.

    Args:
        relaxed: replaces chosen tokens by likely drafts; None accepts drafts strictly.
        grammars: the forms of outputs; None: requests have none.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        relaxed: PutDrafts | None = None,
        grammars: GrammarMasks | None = None,
    ):
        self._config = config
        self._mesh = mesh
        self._relaxed, self._grammars = relaxed, grammars
        self._processors = LogitsProcessors(config.eos_token_ids)

    def sample(self, plan: StepPlan, logits: torch.Tensor, before: StepResult | None = None) -> StepResult:
        """Chooses the tokens of this rank's rows and gathers those of all ranks. It does not wait for the device, but
        for the tokens of the step before if a request with a grammar has some.

        Args:
            plan: the step; the rows of logits of a request are on one rank.
            logits: float32 ``[tokens to choose on this rank, vocab]``; overwritten.
            before: the step before, if its tokens have not been read.
        """
        samples, sampled = plan.samples, None if before is None else before.tokens
        if samples.max_rows == 0:
            none = torch.empty(0, dtype=torch.int64, device=logits.device)
            return StepResult(samples, none, to_host(none))
        unmodified = logits.clone() if samples.max_logprobs >= 0 else logits
        wanted = plan.own.wanted
        broken = not_finite(logits)  # before some become -inf
        self._processors.apply(logits, wanted, sampled)
        if self._grammars is not None:
            numbers, read = range(len(wanted)), None if before is None else before.codes
            if (masks := self._grammars.masks(wanted, numbers, len(wanted), read)) is not None:
                logits = masked(logits, upload(masks, logits.device))
        tokens = self._choose(wanted, logits)
        if self._relaxed is not None:
            tokens = self._relaxed(wanted, logits, tokens)
        tokens.masked_fill_(broken, NOT_FINITE)
        padding = samples.max_rows - len(tokens)
        of_all_ranks = self._mesh.world.all_gather(F.pad(tokens, (0, padding)) if padding else tokens)
        logprobs = None
        if samples.max_logprobs >= 0:
            best = min(samples.max_logprobs, self._config.vocab_size)
            table = F.pad(log_probabilities(unmodified, tokens.clamp(min=0), best), (0, 0, 0, padding))
            logprobs = to_host(self._mesh.world.all_gather(table))
        return StepResult(samples, of_all_ranks, to_host(of_all_ranks), logprobs)

    def _choose(self, wanted: list[Wanted], logits: torch.Tensor) -> torch.Tensor:
        """A token for every row, int64 ``[n]``, or the code of an error, which concerns that row's request only."""
        highest, tokens = _highest(logits)  # the choice of all greedy requests
        drawn = [i for i, (request, *_) in enumerate(wanted) if request.params.temperature > 0]
        if drawn:
            rows = upload(torch.tensor(drawn, dtype=torch.int64), logits.device)
            requests, positions, _ = zip(*(wanted[i] for i in drawn), strict=True)
            keys = [request.draw_key for request in requests]
            tokens[rows] = sample(logits[rows], [r.params for r in requests], keys, positions)
        return tokens.masked_fill_(highest == float("-inf"), NOTHING_LEFT)


def not_finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether a row has infinite logits or NaN, bool ``[n]``, in fewer launches than ``isfinite()``."""
    total = logits.sum(dim=-1)  # finite if all of a row are
    return total - total != 0


def _highest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The highest logit of each row, and its token, ``[n]`` each."""
    if logits.device.type != "cpu":
        highest, tokens = logits.max(dim=-1)
        return highest, tokens
    tokens = logits.argmax(dim=-1)  # max() on a CPU synchronises all threads, even for few rows
    return logits.gather(1, tokens[:, None])[:, 0], tokens


class Draws(NamedTuple):
    """Parameters of n draws, ``[n]`` each, on the device; see :func:`draws_of`."""

    keys: torch.Tensor  # int64, made from the requests' seeds
    temperature: torch.Tensor  # float32
    log_min_p: torch.Tensor  # float32, -inf for none
    top_p: torch.Tensor  # float32, inf for none
    top_k: torch.Tensor  # int64, 0 for none

    @classmethod
    def of_columns(cls, columns: Sequence[torch.Tensor]) -> Draws:
        """Unpacks the int64 columns ``[n]`` of :func:`draws_of`, on any device."""
        keys, *bits, top_k = columns
        temperature, log_min_p, top_p = (column.view(torch.float64).float() for column in bits)
        return cls(keys, temperature, log_min_p, top_p, top_k)


class DrawLimits(NamedTuple):
    """The kinds of limits among the rows of a draw; its launches depend on nothing else."""

    min_p: bool
    top_k: int  # at least the largest; 0 if no row has one
    top_p: bool

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int) -> DrawLimits:
        top_k = max((p.top_k for p in params if 0 < p.top_k < vocab), default=0)
        return cls(any(p.min_p > 0 for p in params), top_k, any(p.top_p < 1 for p in params))

    def rounded(self, vocab: int) -> DrawLimits:
        """Limits with the same effect, of which there are only a few."""
        return self._replace(min_p=True, top_k=next(k for k in (0, 64, 1024, vocab) if self.top_k <= k <= vocab))


def draws_of(params: Sequence[SamplingParams], keys: Sequence[int], vocab: int) -> torch.Tensor:
    """Packs the columns of :class:`Draws` into an int64 tensor ``[5, n]`` on the host, float64 values as bits.

    Args:
        keys: see :func:`seed_key`.
    """
    numbers = [
        [
            # At these two bounds the choice is greedy, or uniform.
            min(max(p.temperature, 1e-30), 1e30),
            math.log(p.min_p) if p.min_p else -math.inf,
            max(p.top_p, 1e-30) if p.top_p < 1 else math.inf,
        ]
        for p in params
    ]
    bits = torch.tensor(numbers, dtype=torch.float64).view(-1, 3).view(torch.int64)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab else 0 for p in params], dtype=torch.int64)
    return torch.cat((torch.tensor([[*keys]], dtype=torch.int64), bits.T, top_k[None]))


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], keys: Sequence[int], positions: Sequence[int]
) -> torch.Tensor:
    """Samples the next token of each row at a temperature above 0, without waiting for the device.

    Args:
        logits: float32 ``[n, vocab]``; -inf forbids a token, and each row has an allowed token.
        keys, positions: key of each request's random numbers, and position of its token; see :func:`draw`.
    """
    vocab = logits.shape[1]
    on_host = torch.cat((draws_of(params, keys, vocab), torch.tensor([[*positions]], dtype=torch.int64)))
    *columns, at = upload(on_host, logits.device)
    return draw(logits, Draws.of_columns(columns), at, DrawLimits.of(params, vocab))


def draw(logits: torch.Tensor, draws: Draws, positions: torch.Tensor, limits: DrawLimits) -> torch.Tensor:
    """Draws a token for each row; the launches depend on shapes and ``limits`` only.

    Args:
        logits: float32 ``[n, vocab]``; -inf forbids a token, and each row has an allowed token.
        positions: int64 ``[n]``, position of each token. Seed and position fix the random numbers, so a choice depends
            neither on the batch nor on the rank, and is repeated after a preemption.
        limits: of all rows together.

    Returns:
        int64 ``[n]``.
    """
    # The highest logit becomes 0, so that no temperature makes it overflow.
    scaled = logits - logits.amax(dim=-1, keepdim=True)
    scaled /= draws.temperature[:, None]
    if limits.min_p:
        scaled.masked_fill_(scaled < draws.log_min_p[:, None], -math.inf)
    if limits.top_k:
        best = scaled.topk(limits.top_k, dim=-1).values
        last = best.gather(1, draws.top_k.clamp(min=1)[:, None] - 1)
        scaled.masked_fill_((scaled < last) & (draws.top_k > 0)[:, None], -math.inf)
    probabilities = scaled.softmax(dim=-1)
    if limits.top_p:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        # A token stays while the tokens before it sum to less than top_p, so the first always stays.
        before = ordered.cumsum(dim=-1) - ordered
        ordered.masked_fill_(before >= draws.top_p[:, None], 0.0)
        probabilities.scatter_(1, order, ordered)
    # Gumbel trick: the largest p / Exp(1) is a sample of p, without the sum that a multinomial draw rounds. A forbidden
    # token (p = 0) never wins: some p is at least 1 / vocab, and the noise is positive and finite.
    return probabilities.div_(exponential_noise(draws.keys, positions, logits.shape[1])).argmax(dim=-1)


def exponential_noise(keys: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Random numbers of the distribution Exp(1), float32 ``[n, count]``.

    Args:
        keys: int64 ``[n]``, see :func:`seed_key`.
        positions: int64 ``[n]``.

    A row depends on its key and position alone, and is the same on every device up to the rounding of a logarithm. It
    is the output of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014) from a
    state that its output function makes from the key and the position.
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


def log_probabilities(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> torch.Tensor:
    """Log-probabilities of given tokens and of the ``count`` most likely tokens.

    Args:
        logits: float32 ``[n, vocab]``.
        tokens: int64 ``[n]``.

    Returns:
        float64 ``[n, 2 + 2 * count]``, exact for any token id: the log-probability of the token; its rank, the number
        of tokens at least as likely; the ids of the most likely tokens, in order; their log-probabilities.
    """
    of_all = logits.log_softmax(dim=-1)
    best, ids = of_all.topk(count, dim=-1)
    own = of_all.gather(1, tokens[:, None])
    rank = (of_all >= own).sum(dim=-1, keepdim=True)
    return torch.cat((own.double(), rank.double(), ids.double(), best.double()), dim=1)
