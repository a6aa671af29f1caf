"""Which drafts are accepted.

The rule: a draft is accepted while it equals the token that was chosen in its place, and those before it are. So a
request gets the tokens that it would have got without drafts.

Relaxed acceptance changes outputs, and so is off unless asked for (``relaxed_topk``). While a model thinks, a draft
counts that the model finds likely, too: it takes the place of the token that was chosen, if it is among the
``relaxed_topk`` most likely ones and its probability is at least that of the most likely one less ``relaxed_delta``.
Probabilities are the model's, with forbidden tokens and penalties, before temperature. Only between the tokens that
begin and end the thinking: outside, and for the one that ends it, a draft has to be the model's own choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

import torch

from dsa_engine.config.speculative import SpeculativeConfig
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.sampling.processors import Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.text.tokenizer import Tokenizer

# Says how many drafts are accepted, int64 [n], where tokens mean nothing and speed is measured: from the keys of the
# requests' seeds and the positions of their last tokens, int64 [n] each, and the largest number of drafts.
Assume = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

THINKING = ("<think>", "</think>")


def count_accepted(
    tokens: torch.Tensor, drafts: torch.Tensor, offered: torch.Tensor, assumed: torch.Tensor | None = None
) -> torch.Tensor:
    """How many of its drafts each request keeps, int64 ``[n]``.

    Args:
        tokens: int64 ``[n, 1 + count]``, chosen at the place of each draft, and after the last.
        drafts: int64 ``[n, count]``.
        offered: int64 ``[n]``: the first so many of them were verified; the others are void.
        assumed: int64 ``[n]``, in place of what the tokens say (:data:`Assume`).
    """
    if assumed is None:
        assumed = (tokens[:, :-1] == drafts).long().cumprod(dim=1).sum(dim=1)
    return assumed.minimum(offered)


class RelaxedAcceptance:
    """Puts likely drafts in the place of chosen tokens.

    Args:
        topk, delta: ``relaxed_topk`` and ``relaxed_delta``.
        begin, end: the tokens that begin and end the thinking.
    """

    def __init__(self, topk: int, delta: float, begin: int, end: int):
        self._topk = topk
        self._delta = delta
        self._begin = begin
        self._end = end
        self._seen: WeakKeyDictionary[Request, tuple[int, bool]] = WeakKeyDictionary()  # up to where; thinks there

    @classmethod
    def of(
        cls, speculation: SpeculativeConfig | None, folder: Path, trust_remote_code: bool
    ) -> RelaxedAcceptance | None:
        """None where drafts are accepted strictly.

        Raises:
            ValueError: the tokens that begin and end the thinking are not known.
        """
        if speculation is None or speculation.relaxed_topk == 0:
            return None
        ids = (speculation.begin_thinking_token, speculation.end_thinking_token)
        if ids == (None, None) and Tokenizer.lies_in(folder):
            tokenizer = Tokenizer(folder, trust_remote_code)
            found = [tokenizer.encode(text, add_special_tokens=False) for text in THINKING]
            if all(len(one) == 1 for one in found):
                ids = (found[0][0], found[1][0])
        begin, end = ids
        if begin is None or end is None:
            raise ValueError(
                f"relaxed_topk works between the tokens {THINKING[0]} and {THINKING[1]}, which the tokenizer of "
                f"{folder} does not have; name others by begin_thinking_token and end_thinking_token, or leave "
                "relaxed_topk out"
            )
        return cls(speculation.relaxed_topk, speculation.relaxed_delta, begin, end)

    def __call__(self, wanted: Sequence[Wanted], logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens, drafts in the place of some.

        Args:
            wanted: for every row, whose token it is and at which position.
            logits: float32 ``[rows, vocab]``, -inf for what is forbidden.
            tokens: int64 ``[rows]``, the choices; below 0 codes of errors, which stay.
        """
        found = []
        for i, (request, position) in enumerate(wanted):
            number = position - len(request)
            if 0 <= number < len(request.drafts) and self._thinks(request, number):
                found.append((i, request.drafts[number]))
        if not found:
            return tokens
        at, guessed = upload(torch.tensor(found).T.contiguous(), logits.device)
        probabilities = logits[at].softmax(dim=-1)
        best = probabilities.topk(min(self._topk, logits.shape[1]), dim=-1).values
        likely = probabilities.gather(1, guessed[:, None])[:, 0]
        accepted = (likely >= best[:, -1]) & (likely >= best[:, 0] - self._delta) & (tokens[at] >= 0)
        return tokens.index_copy(0, at, guessed.where(accepted, tokens[at]))

    def _thinks(self, request: Request, number: int) -> bool:
        """Whether a request thinks after ``number`` of its drafts, and still does with the next."""
        done, thinks = self._seen.get(request, (0, False))
        thinks = self._thinks_after(request.tokens(done, len(request) - done), thinks)
        self._seen[request] = len(request), thinks
        return self._thinks_after(request.drafts[:number], thinks) and request.drafts[number] != self._end

    def _thinks_after(self, tokens: Sequence[int], thinks: bool) -> bool:
        for token in tokens:
            thinks = token == self._begin or (thinks and token != self._end)
        return thinks
