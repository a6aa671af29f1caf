"""Rules for the acceptance of drafts.

Strict rule: a draft is accepted if it equals the token that the model chooses at its position, and all drafts before it
are accepted. So a request gets the same tokens as without drafts.

Relaxed acceptance changes outputs and is off by default (``relaxed_topk``). Between the tokens that begin and end the
model's thinking, a likely draft replaces the chosen token: one that is among the ``relaxed_topk`` most likely tokens,
and whose probability is at least the highest probability minus ``relaxed_delta``. Probabilities are those after
forbidden tokens and penalties, before temperature. Elsewhere, and for the token that ends the thinking, the strict rule
holds. The host knows whether a request thinks up to the tokens that it has read; a graph goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.engine.requests.request import NEVER, Request
from dsa_engine.engine.sampling.thinking import begun
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.text.tokenizer import THINKING, Tokenizer

# Number of accepted drafts of each request, int64 [n], from
#   tokens: int64 [n, 1 + count], chosen at the position of each draft, and after the last
#   drafts: int64 [n, count]
#   keys: int64 [n], keys of the requests' seeds
#   positions: int64 [n], positions of the requests' last tokens before the drafts
AcceptanceRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def count_equal(tokens: torch.Tensor, drafts: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """The strict rule (:data:`AcceptanceRule`)."""
    return (tokens[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)


@dataclass(eq=False)
class RelaxedAcceptance:
    _topk: int
    _delta: float
    _begin: int  # this and the next: the tokens that begin and end the thinking
    _end: int

    @classmethod
    def of(
        cls, speculation: SpeculativeConfig | None, folder: Path, trust_remote_code: bool
    ) -> RelaxedAcceptance | None:
        """None: drafts are accepted strictly."""
        if speculation is None or speculation.relaxed_topk == 0:
            return None
        ids = (speculation.begin_thinking_token, speculation.end_thinking_token)
        if ids == (None, None) and Tokenizer.lies_in(folder):
            tokenizer = Tokenizer(folder, trust_remote_code)
            encoded = [tokenizer.encode(text, add_special_tokens=False) for text in THINKING]
            if all(len(one) == 1 for one in encoded):
                ids = (encoded[0][0], encoded[1][0])
        begin, end = ids
        if begin is None or end is None:
            raise ValueError(
                f"relaxed_topk works between the tokens {THINKING[0]} and {THINKING[1]}, which the tokenizer of "
                f"{folder} does not have; name others by begin_thinking_token and end_thinking_token, or leave "
                "relaxed_topk out"
            )
        return cls(speculation.relaxed_topk, speculation.relaxed_delta, begin, end)

    def __call__(self, wanted: Sequence[Wanted], logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The ``tokens`` of an eager step, int64 ``[rows]``, some of them replaced by drafts; negative codes of errors
        stay. ``logits``: float32 ``[rows, vocab]``, -inf for forbidden tokens."""
        drafts = [self._draft(request, position - len(request)) for request, position, _ in wanted]
        if max(drafts, default=-1) < 0:
            return tokens
        return self.replace(logits, tokens, upload(torch.tensor(drafts), logits.device))

    def replace(self, logits: torch.Tensor, tokens: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The tokens, some of them replaced by likely ``drafts``, int64 ``[rows]``, −1 for none; always the same
        launches."""
        probabilities = logits.softmax(dim=-1)
        likely = probabilities.gather(1, drafts.clamp(min=0)[:, None])
        is_among_best = (probabilities > likely).sum(dim=-1) < self._topk
        likely = likely[:, 0]
        is_near_best = (likely > 0) & (likely >= probabilities.amax(dim=-1) - self._delta)
        return drafts.where((drafts >= 0) & (tokens >= 0) & is_among_best & is_near_best, tokens)

    def replacing(self, thinks: torch.Tensor, unread: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """The drafts of a step that may replace chosen tokens, −1 for others; always the same launches. ``thinks [n]``:
        1 after :meth:`thinks`, else 0; ``unread [n, m]``: the tokens after those that the host knows, ``drafts [n,
        count]``: those that follow, −1 for none; all int64."""
        tokens = torch.cat((unread, drafts), dim=1)
        number = torch.arange(2, 2 + 2 * tokens.shape[1], 2, device=tokens.device)
        # Each token that begins or ends the thinking has a higher number than those before it, odd where it begins.
        marks = (number + 1).where(tokens == self._begin, number.where(tokens == self._end, 0))
        last = torch.cat((thinks[:, None], marks), dim=1).cummax(dim=1).values[:, unread.shape[1] : -1]
        return drafts.where((last % 2 == 1) & (drafts != self._end), -1)

    def thinks(self, request: Request) -> bool:
        """Whether a request thinks after the tokens that the host knows."""
        return begun(request, self._begin, self._end) != NEVER

    def _draft(self, request: Request, number: int) -> int:
        """The draft of a request that may replace the token after ``number`` others; −1: none may."""
        if not 0 <= number < len(request.drafts):
            return -1
        *before, draft = request.drafts[: number + 1]
        marks = [token for token in before if token in (self._begin, self._end)]
        thinks = marks[-1] == self._begin if marks else self.thinks(request)
        return draft if draft != self._end and thinks else -1
