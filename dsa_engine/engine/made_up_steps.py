"""Steps over made-up requests: the largest that may come, and any decode step, before a request has come.

All pages of a made-up request are page 0: the rows that it reads are no token's, and where it writes none has been
written yet. What a step takes depends on shapes alone, and those are right.
"""

from __future__ import annotations

from dataclasses import replace

from dsa_engine.engine.pages import pages_for
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.parallel import Mesh
from dsa_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# What takes most in sampling: every row is drawn, from a part of the vocabulary, and its request has its tokens counted
# in a table; with the host's help, biases in another one, and log-probabilities besides.
DRAWN = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.5, seed=0, max_tokens=64)
WITH_HOST = replace(DRAWN, logit_bias={0: 1.0}, logprobs=1)


def prefill_steps(
    mesh: Mesh, page_size: int, tokens: int, max_model_len: int, max_num_seqs: int, num_drafts: int = 0
) -> list[list[Chunk]]:
    """The first step of the longest prompt and its last one; of several prompts, where one does not fill a step.

    Args:
        tokens: of a context-parallel group in a step, at most.
        num_drafts: that are made of each prompt behind it.
    """
    longest = min(tokens, max_model_len)
    starts = dict.fromkeys((0, max_model_len - longest))
    return [_prefill(mesh, page_size, start, longest, tokens, max_num_seqs, num_drafts) for start in starts]


def _prefill(
    mesh: Mesh, page_size: int, start: int, length: int, tokens: int, most: int, num_drafts: int
) -> list[Chunk]:
    chunks, made_up = [], _MadeUp(start + length, page_size, WITH_HOST, num_drafts)
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    for group in range(mesh.world_size // mesh.cp_size):
        for part in lengths[:most]:
            chunks.append(Chunk(made_up.request(), start, part, mesh.cp_ranks(group)))
    return chunks


def decode_step(
    mesh: Mesh, page_size: int, requests: int, context: int, num_drafts: int, params: SamplingParams
) -> list[Chunk]:
    """``requests`` on every rank, each with ``num_drafts`` drafts to verify and as many to be made, up to ``context``
    tokens in all."""
    chunks, rows = [], 1 + num_drafts
    made_up = _MadeUp(max(1, context - 2 * num_drafts), page_size, params, num_drafts)
    for rank in range(mesh.world_size):
        for _ in range(requests):
            request = made_up.request()
            request.num_prefill_tokens = request.num_computed_tokens  # it decodes its last token
            request.drafts = [0] * num_drafts
            chunks.append(Chunk(request, len(request) - 1, rows, range(rank, rank + 1), num_logits=rows))
    return chunks


class _MadeUp:
    """Requests of the same length, which share their tokens and pages: there may be thousands of long ones. They have
    pages for drafts that are verified, and as many that are made."""

    def __init__(self, length: int, page_size: int, params: SamplingParams, num_drafts: int):
        self._prompt, self._pages = [0] * length, [0] * pages_for(length + 2 * num_drafts, page_size)
        self._params, self._made = params, 0

    def request(self) -> Request:
        self._made += 1
        request = Request(-self._made, self._prompt, self._params, pages=self._pages)
        request.num_computed_tokens = len(self._prompt) - 1
        return request
