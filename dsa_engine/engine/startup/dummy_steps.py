"""Steps of dummy requests, run before the first request: the largest possible ones count memory, others capture graphs.

All pages of a dummy request are page 0, so it reads rows of no token. Time and memory of a step depend on shapes only,
and these are right.
"""

from __future__ import annotations

from dataclasses import replace

from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.parallel import Mesh
from dsa_engine.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# Sampling that takes the most memory in a graph: every row is drawn from a part of the vocabulary, and its request has
# penalties; and in an eager step: there are biases and log-probabilities too.
DRAWN = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.5, seed=0, max_tokens=64)
WITH_HOST = replace(DRAWN, logit_bias={0: 1.0}, logprobs=1)


def prefill_steps(
    mesh: Mesh, page_size: int, tokens: int, max_model_len: int, max_num_seqs: int, num_drafts: int = 0
) -> list[list[Chunk]]:
    """The first and the last step of the longest prompt; with several such prompts if one does not fill a step.

    Args:
        tokens: maximum number of tokens of a context-parallel group in a step.
        num_drafts: number of drafts made after each prompt.
    """
    longest = min(tokens, max_model_len)
    starts = dict.fromkeys((0, max_model_len - longest))
    return [_prefill(mesh, page_size, start, longest, tokens, max_num_seqs, num_drafts) for start in starts]


def _prefill(
    mesh: Mesh, page_size: int, start: int, length: int, tokens: int, max_num_seqs: int, num_drafts: int
) -> list[Chunk]:
    chunks, dummies = [], _DummyRequests(start + length, page_size, WITH_HOST, num_drafts)
    lengths = [length] * (tokens // length) + [tokens % length] * (tokens % length > 0)
    for group in range(mesh.world_size // mesh.cp_size):
        for part in lengths[:max_num_seqs]:
            chunks.append(Chunk(dummies.request(), start, part, mesh.cp_ranks(group)))
    return chunks


def decode_step(
    mesh: Mesh, page_size: int, requests: int, context: int, num_drafts: int, params: SamplingParams
) -> list[Chunk]:
    """A decode step of ``requests`` on every rank. Each verifies ``num_drafts`` drafts and makes as many, and comes to
    ``context`` tokens with them."""
    chunks, rows = [], 1 + num_drafts
    dummies = _DummyRequests(max(1, context - 2 * num_drafts), page_size, params, num_drafts)
    for rank in range(mesh.world_size):
        for _ in range(requests):
            request = dummies.request()
            request.num_prefill_tokens = request.num_computed_tokens  # it decodes its last token
            request.drafts = [0] * num_drafts
            chunks.append(Chunk(request, len(request) - 1, rows, range(rank, rank + 1), num_logits=rows))
    return chunks


class _DummyRequests:
    """Makes requests of the same length, with pages for the drafts that they verify and make.

    They have their lists of tokens and pages in common, as there may be thousands of long requests.
    """

    def __init__(self, length: int, page_size: int, params: SamplingParams, num_drafts: int):
        self._prompt, self._pages = [0] * length, [0] * pages_for(length + 2 * num_drafts, page_size)
        self._params, self._made = params, 0

    def request(self) -> Request:
        self._made += 1
        request = Request(-self._made, self._prompt, self._params, pages=self._pages)
        request.num_computed_tokens = len(self._prompt) - 1
        return request
