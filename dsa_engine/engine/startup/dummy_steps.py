"""Steps over made-up requests, before a request has come: the largest that may come and any decode step, to count
memory and capture graphs; and two small ones through one layer of each kind, in which kernels are compared.

All pages of a made-up request are page 0: the rows that it reads are no token's. What a step takes depends on shapes
alone, and those are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.pages import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.batch import build_batch
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
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


_PAGE_SIZE = 64


def layers_of_each_kind(config: ModelConfig) -> list[int]:
    """The first layer of every kind: dense or with experts, with an indexer of its own or the selection of another."""
    first: dict[tuple[str, str], int] = {}
    for layer, kind in enumerate(zip(config.mlp_layer_types, config.indexer_types, strict=True)):
        first.setdefault(kind, layer)
    return sorted({0, *first.values()})  # the first layer selects for those that do not


@torch.inference_mode()
def try_steps(model: Model, config: ModelConfig, mesh: Mesh, stored: CacheFormat, tokens: int) -> Iterator[str]:
    """Runs a prefill of ``tokens`` tokens by each context-parallel group, then a decode step of one of its tokens on
    every rank, through one layer of each kind; all ranks together. Yields what it has run."""
    layers = layers_of_each_kind(config)
    pages = pages_for(tokens + 1, _PAGE_SIZE)
    with torch.random.fork_rng(devices=[]):
        ids = torch.randint(config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    cache = KVCache(config, stored, pages, _PAGE_SIZE, mesh.device)

    def run(chunks: list[Chunk]) -> None:
        plan = StepPlan.of(chunks, mesh.world_size, config, mesh.config.cp_layout)
        batch = build_batch(plan, config, mesh, cache.block_tables, None)
        model.logits(model(batch, cache, layers)[-1:])

    def request(number: int) -> Request:
        return Request(number, ids, SamplingParams(), pages=list(range(pages)))

    groups = range(mesh.world_size // mesh.cp_size)
    run([Chunk(request(group), 0, tokens, mesh.cp_ranks(group)) for group in groups])
    yield "prefill"
    run([Chunk(request(rank), tokens, 1, range(rank, rank + 1)) for rank in range(mesh.world_size)])
    yield "decode"
