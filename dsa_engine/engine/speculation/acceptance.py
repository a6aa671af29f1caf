"""Rules for the acceptance of drafts.

Strict rule: a draft is accepted if it equals the token that the model chooses at its position, and all drafts before it
are accepted. So a request gets the same tokens as without drafts.

Relaxed acceptance changes outputs and is off by default (``relaxed_topk``). Between the tokens that begin and end the
model's thinking, a likely draft replaces the chosen token: one that is among the ``relaxed_topk`` most likely tokens,
and whose probability is at least the highest probability minus ``relaxed_delta``. Probabilities are those after
forbidden tokens and penalties, before temperature. Elsewhere, and for the token that ends the thinking, the strict rule
holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.plan import Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.text.tokenizer import Tokenizer

# Number of accepted drafts of each request, int64 [n], from
#   tokens: int64 [n, 1 + count], chosen at the position of each draft, and after the last
#   drafts: int64 [n, count]
#   keys: int64 [n], keys of the requests' seeds
#   positions: int64 [n], positions of the requests' last tokens before the drafts
AcceptanceRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

THINKING = ("<think>", "</think>")


def count_equal(tokens: torch.Tensor, drafts: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """The strict rule (:data:`AcceptanceRule`)."""
    return (tokens[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)


class RelaxedAcceptance:
    """Replaces chosen tokens by likely drafts.

    Args:
        begin, end: tokens that begin and end the thinking.
    """

    def __init__(self, topk: int, delta: float, begin: int, end: int):
        self._topk = topk
        self._delta = delta
        self._begin = begin
        self._end = end
        self._seen: WeakKeyDictionary[Request, tuple[int, bool]] = WeakKeyDictionary()  # length, thinks there

    @classmethod
    def of(
        cls, speculation: SpeculativeConfig | None, folder: Path, trust_remote_code: bool
    ) -> RelaxedAcceptance | None:
        """The rule of these options; None if drafts are accepted strictly.

        Raises:
            ValueError: the tokens that begin and end the thinking are not known.
        """
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
        """The tokens, some of them replaced by drafts.

        Args:
            wanted: request and position of every row's token.
            logits: float32 ``[rows, vocab]``, -inf for forbidden tokens.
            tokens: int64 ``[rows]``, the choices; negative codes of errors stay.
        """
        candidates = []  # (row, draft)
        for i, (request, position, _) in enumerate(wanted):
            number = position - len(request)
            if 0 <= number < len(request.drafts) and self._thinks(request, number):
                candidates.append((i, request.drafts[number]))
        if not candidates:
            return tokens
        at, guessed = upload(torch.tensor(candidates).T.contiguous(), logits.device)
        probabilities = logits[at].softmax(dim=-1)
        best = probabilities.topk(min(self._topk, logits.shape[1]), dim=-1).values
        likely = probabilities.gather(1, guessed[:, None])[:, 0]
        accepted = (likely >= best[:, -1]) & (likely >= best[:, 0] - self._delta) & (likely > 0) & (tokens[at] >= 0)
        return tokens.index_copy(0, at, guessed.where(accepted, tokens[at]))

    def _thinks(self, request: Request, number: int) -> bool:
        """Whether a request thinks after ``number`` of its drafts, and the next draft does not end that."""
        done, thinks = self._seen.get(request, (0, False))
        thinks = self._thinks_after(request.tokens(done, len(request) - done), thinks)
        self._seen[request] = len(request), thinks
        return self._thinks_after(request.drafts[:number], thinks) and request.drafts[number] != self._end

    def _thinks_after(self, tokens: Sequence[int], thinks: bool) -> bool:
        for token in tokens:
            thinks = token == self._begin or (thinks and token != self._end)
        return thinks
