"""Steps of dummy requests before the first request: the largest steps count memory, the likely decode steps are
captured as CUDA graphs.

Memory is counted beside weights and caches, before there are caches. The largest steps have run every collective once,
so NCCL has its buffers; cuBLAS has its workspaces and kernels are loaded. So memory that is free afterwards stays free.
Routing is forced to be even, which fills a round of a dispatch to its limit (`parallel/experts/`): other routing takes
more rounds, not more memory. Two amounts are added: the results of earlier rounds, and rows that a given
``moe_chunk_size`` allows beyond even routing.

All pages of a dummy request are page 0 of a rank, so it reads rows of no token. Time and memory of a step depend on
shapes only, and these are right.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.draft_number import choices_up_to
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep, Samples
from dsa_engine.engine.requests.scheduler import Step
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.sampling.chain import LARGEST
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.micro_batches import MicroBatches
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.attention.expand_latents import max_tokens
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.model.kv_cache import KVCache, pool_page_bytes
from dsa_engine.model.model import Model
from dsa_engine.model.moe import MoE
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.dispatch import PrefillSizes
from dsa_engine.parallel.experts.traffic import RowBytes
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.sizes import format_bytes

logger = logging.getLogger(__name__)

# Memory of a captured graph outside of PyTorch's allocator, and of its buffers. Assumed, not measured: a kernel in a
# graph takes some KB, and a decode step of V3.2 has about 2,700 kernels.
GRAPH_BYTES = 32 << 20
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
# In a graph, and in an eager step: there are biases and log-probabilities too.
DRAWN = replace(LARGEST, max_tokens=64)
WITH_HOST = replace(DRAWN, logit_bias={0: 1.0}, logprobs=1)


@dataclass
class DummySteps:
    """Makes steps of dummy requests, the same on every rank. ``num_drafts``: number of drafts that a decode step
    verifies and makes for each request, and that a prefill makes."""

    mesh: Mesh
    options: EngineOptions
    max_model_len: int
    num_drafts: int = 0
    _ids: Iterator[int] = field(default_factory=lambda: count(-1, -1), init=False)  # no other request has such a number

    def prefills(self) -> list[Step]:
        """The first and the last step of the longest prompt; with several such prompts if one does not fill a step."""
        tokens = self.options.max_num_batched_tokens * self.mesh.cp_size
        longest = min(tokens, self.max_model_len)
        lengths = [longest] * (tokens // longest) + [tokens % longest] * (tokens % longest > 0)
        lengths = lengths[: self.options.max_num_seqs]
        groups = [self.mesh.cp_ranks(group) for group in range(self.mesh.world_size // self.mesh.cp_size)]
        parts = [(length, ranks) for ranks in groups for length in lengths]
        steps = []
        for start in dict.fromkeys((0, self.max_model_len - longest)):
            requests = self._requests(len(parts), start + longest, WITH_HOST)
            chunks = [Chunk(one, start, *part) for one, part in zip(requests, parts, strict=True)]
            steps.append(Step(chunks, num_drafts=self.num_drafts))
        return steps

    def classes(self, copies: int) -> Iterator[Step]:
        """The steps after which all ranks are connected in the ways of all steps, each made when those before have run:
        a decode step, the smallest prefill, any that takes another dispatch; ``copies`` of each token travel."""
        mesh, tokens = self.mesh, self.options.max_num_batched_tokens
        sizes = {min(1 << i, tokens) for i in range(next_power_of_2(tokens).bit_length())}
        lengths = {min(size * mesh.cp_size, self.max_model_len) for size in sizes}
        yield self.decode(1, 2, GREEDY)
        for length in sorted(lengths):
            if length == min(lengths) or mesh.experts.dispatchers[False].is_new(cdiv(length, mesh.cp_size) * copies):
                requests = enumerate(self._requests(mesh.world_size // mesh.cp_size, length, GREEDY))
                chunks = [Chunk(one, 0, length, mesh.cp_ranks(group)) for group, one in requests]
                yield Step(chunks, num_drafts=self.num_drafts)

    def decode(self, requests: int, context: int, params: SamplingParams) -> Step:
        """A decode step of ``requests`` on every rank, which come to ``context`` tokens with their drafts."""
        rank, world, rows = self.mesh.rank, self.mesh.world_size, 1 + self.num_drafts
        own = self._requests(requests, max(1, context - 2 * self.num_drafts), params)
        for request in own:
            request.num_prefill_tokens = request.num_computed_tokens  # it decodes its last token
            request.drafts = [0] * self.num_drafts
        chunks = [Chunk(request, len(request) - 1, rows, range(rank, rank + 1), num_logits=rows) for request in own]
        keys, logprobs = np.arange(world * requests), -1 if params.logprobs is None else params.logprobs
        counts, starts = np.full(len(keys), rows), np.full(len(keys), len(own[0]) - 1)
        samples = Samples.by_rank(keys, keys // requests, counts, world, logprobs)
        return Step(chunks, DecodeStep(chunks, samples, starts, own[0].asks, params.num_best), self.num_drafts)

    def likely_buckets(self) -> list[tuple[int, int]]:
        """Requests of a rank and context of the decode steps to capture, the largest first, as smaller graphs reuse its
        memory.

        These are any number of requests, divided evenly over the ranks, or the numbers in ``cudagraph_capture_sizes``;
        each with any context: to capture in the middle of serving, all requests wait.
        """
        contexts = ContextBuckets(self.max_model_len, self.options.page_size).all(self.num_drafts)
        sizes = self.options.cudagraph_capture_sizes
        if sizes is None:
            of_rank = next_power_of_2(cdiv(self.options.max_num_seqs, self.mesh.world_size))
            sizes = [1 << i for i in range(of_rank.bit_length())]
        return sorted({(next_power_of_2(size), context) for size in sizes for context in contexts}, reverse=True)

    def _requests(self, number: int, length: int, params: SamplingParams) -> list[Request]:
        """Requests of ``length`` tokens, with pages for their drafts. They have their lists of tokens and pages in
        common, as there may be thousands of long requests."""
        count, ranks = pages_for(length + 2 * self.num_drafts, self.options.page_size), self.mesh.dcp.size
        prompt, pages = array("i", [0]) * length, [number % ranks for number in range(count)]
        requests = [Request(next(self._ids), prompt, params, pages=pages) for _ in range(number)]
        for request in requests:
            request.num_computed_tokens = length - 1
        return requests


def connect(
    model: Model, stored: CacheFormat, steps: DummySteps, relaxed: RelaxedAcceptance | None, graphs: bool
) -> None:
    """Runs :meth:`DummySteps.classes`, so that no request waits while NCCL connects ranks; every rank calls it."""
    runner, config = _runner(model, stored, steps, relaxed, graphs), model.config
    with _fitting(), steps.mesh.experts.even_routing():
        for step in steps.classes(config.num_experts_per_tok if config.batch_invariant else 1):
            _peak(steps.mesh, runner, step)
    free, total = torch.cuda.mem_get_info(steps.mesh.device)
    outside = format_bytes(total - free - torch.cuda.memory_reserved(steps.mesh.device))
    logger.info("ranks connected; NCCL's communicators, CUDA and other programs take %s of the device", outside)


@contextmanager
def _fitting() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the largest step does not fit beside the weights ({str(error).splitlines()[0]}); lower "
            "max_num_batched_tokens, max_num_seqs or workspace, or use more ranks"
        ) from error


def _runner(
    model: Model, stored: CacheFormat, steps: DummySteps, relaxed: RelaxedAcceptance | None, graphs: bool
) -> ModelRunner:
    """A runner with a cache of one page; ``graphs``: whether decode steps are padded as those in graphs are."""
    mesh, options = steps.mesh, steps.options
    cache = KVCache(model.config.with_mtp(len(model.mtp)), stored, 1, options.page_size, mesh.device, mesh.dcp)
    contexts = ContextBuckets(steps.max_model_len, options.page_size)
    padded = DecodeGraphs(model, cache, capture=False, contexts=contexts) if graphs else None
    runner = ModelRunner(model, cache, padded, relaxed, MicroBatches.of(options, mesh))
    runner.num_drafts = steps.num_drafts
    return runner


def step_bytes(
    model: Model, stored: CacheFormat, steps: DummySteps, relaxed: RelaxedAcceptance | None, graphs: bool
) -> int:
    """Maximum bytes that a step takes on the device beside weights and caches, graphs included; every rank calls it.
    ``graphs``: whether decode steps will be captured."""
    config, mesh, options, drafts = model.config, steps.mesh, steps.options, steps.num_drafts
    runner = _runner(model, stored, steps, relaxed, graphs)
    kinds = (DRAWN, WITH_HOST) if drafts else (WITH_HOST,)  # with drafts the first is a graph, the second runs eagerly
    before = torch.cuda.memory_allocated(mesh.device)
    with _fitting(), mesh.experts.even_routing():
        decodes = (steps.decode(options.max_num_seqs, steps.max_model_len, kind) for kind in kinds)
        decode = max(_peak(mesh, runner, step) for step in decodes) - before
        # Tables of penalties and biases stay from step to step.
        tables = torch.cuda.memory_allocated(mesh.device) - before
        prefill = max(_peak(mesh, runner, step) for step in steps.prefills()) - before
    token = torch.empty(1, config.hidden_size, dtype=runner.dtype, device=mesh.device)
    words = any(layer.experts.product.to_words is not None for layer in model.modules() if isinstance(layer, MoE))
    prefill += uneven_bytes(config, mesh, options.max_num_batched_tokens, runner.dtype, words)
    if stored.index_key is not None:  # a step of several requests sees more tokens than one of these
        prefill += max_tokens(token, stored.latent, model.runtime.workspace) * stored.latent.width * token.itemsize
    # The pages of dummy requests are few: buffers of two layers, and what is sent.
    if runner.cache.group is not None or options.hot_rows:
        pages = pages_for(steps.max_model_len, options.page_size)
        page = max(map(sum, pool_page_bytes(config.with_mtp(len(model.mtp)), stored, options.page_size)))
        prefill += 2 * page * (pages + pages_for(pages, mesh.dcp.size))
    if not graphs:
        return max(prefill, decode)
    # Twice: for the pool of the graphs, and for the warm-up on their stream.
    count = len(choices_up_to(drafts)) * len(steps.likely_buckets())
    return max(prefill, decode) + 2 * (decode - tables) + count * GRAPH_BYTES


def uneven_bytes(config: ModelConfig, mesh: Mesh, tokens: int, dtype: torch.dtype, words: bool = False) -> int:
    """Maximum bytes of a prefill's dispatch beyond one with even routing: results of earlier rounds, where even routing
    has one round; and pairs of a token and an expert beyond an even round, if ``moe_chunk_size`` allows them.

    A further pair takes its rows between the products, and the tokens and sums that :class:`.dispatch.Memory` names.
    ``tokens``: those of a rank; ``words``: whether tokens travel to experts in another form than sums travel back.
    """
    ranks, k, chunk = mesh.world_size, config.num_experts_per_tok, mesh.config.moe_chunk_size
    if config.batch_invariant:  # each pair travels by itself
        tokens, k = tokens * k, 1
    if "sparse" not in config.mlp_layer_types:
        return 0
    row = RowBytes.of(config.hidden_size * dtype.itemsize, k)
    sizes = PrefillSizes(tokens, k, ranks, chunk, row.there, row.back, words)
    held, pairs, rounds, rows = mesh.experts.dispatchers[False].memory(sizes)
    rows += mesh.experts.quantized_sum_bytes is not None  # codes beside sums
    further = 0 if chunk is None else max(0, min(pairs, ranks * sizes.pairs) - sizes.pairs // rounds)
    return held + further * (2 * config.moe_intermediate_size + rows * config.hidden_size) * dtype.itemsize


def _peak(mesh: Mesh, runner: ModelRunner, step: Step) -> int:
    """Maximum bytes allocated at once while a step runs; ends its requests."""
    device = mesh.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(runner.plan(step)).read()
    torch.cuda.synchronize(device)
    for chunk in step.chunks:
        chunk.request.finish_reason = "abort"  # frees their rows of tables
    return torch.cuda.max_memory_allocated(device)
