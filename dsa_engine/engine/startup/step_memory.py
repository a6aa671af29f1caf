"""What steps take beside weights and caches: the largest ones are run before there are caches, and the bytes counted.

Then NCCL has its buffers, as every collective has run once, cuBLAS has its workspaces and kernels are loaded; so what
is free afterwards is free for good. Routing is forced to be even, which fills a dispatch's round to its bound
(`parallel/experts/`): other routing takes more rounds, not more memory. What comes back in these,
and what a `moe_chunk_size` allows beyond that, is added.
"""

from __future__ import annotations

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.request import Chunk
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.startup.capture import likely_buckets
from dsa_engine.engine.startup.dummy_steps import DRAWN, WITH_HOST, decode_step, prefill_steps
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.all_to_all import rounds_needed

# What a captured graph takes outside of PyTorch's memory and in buffers of its own. Assumed, not measured: a kernel in
# a graph takes some KB, and V3.2 has about 2,700 of them in a decode step.
GRAPH_BYTES = 32 << 20


def step_bytes(
    model: Model,
    config: ModelConfig,
    mesh: Mesh,
    stored: CacheFormat,
    options: EngineOptions,
    max_model_len: int,
    relaxed: RelaxedAcceptance | None,
    graphs: bool,
) -> int:
    """Bytes on the device that any step takes beside weights and caches, graphs included; every rank calls it.

    Args:
        graphs: whether decode steps will be captured.

    Raises:
        CapacityError: the largest steps do not fit beside the weights.
    """
    drafts = options.speculation.num_speculative_tokens if options.speculation else 0
    cache = KVCache(model.config.with_mtp(len(model.mtp)), stored, 1, options.page_size, mesh.device)
    contexts = ContextBuckets(max_model_len, options.page_size)
    padded = DecodeGraphs(model, cache, config, mesh, capture=False, contexts=contexts) if graphs else None
    runner = ModelRunner(model, cache, config, mesh, options.seed, padded, relaxed=relaxed)
    runner.num_drafts = drafts
    tokens, page_size = options.max_num_batched_tokens * mesh.cp_size, options.page_size
    kinds = (DRAWN, WITH_HOST) if drafts else (WITH_HOST,)  # with drafts, one is a graph, and one runs eagerly
    decodes = (decode_step(mesh, page_size, options.max_num_seqs, max_model_len, drafts, kind) for kind in kinds)
    before = torch.cuda.memory_allocated(mesh.device)
    try:
        with mesh.even_routing():
            decode = max(_peak(mesh, runner, chunks) for chunks in decodes) - before
            # Penalties and biases of requests stay in tables from step to step.
            kept = torch.cuda.memory_allocated(mesh.device) - before
            steps = prefill_steps(mesh, page_size, tokens, max_model_len, options.max_num_seqs, drafts)
            prefill = max(_peak(mesh, runner, chunks) for chunks in steps) - before
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the largest step does not fit beside the weights ({str(error).splitlines()[0]}); lower "
            "max_num_batched_tokens, max_num_seqs or workspace, or use more ranks"
        ) from error
    unseen = [of(config, mesh, options.max_num_batched_tokens, runner.dtype) for of in (returned_bytes, unfilled_bytes)]
    most = max(prefill + sum(unseen), decode)
    if not graphs:
        return most
    # The graphs' own pool, and what stays of the warm-up on their stream.
    count = len(likely_buckets(mesh, options, max_model_len, drafts))
    return most + 2 * (decode - kept) + count * GRAPH_BYTES


def returned_bytes(config: ModelConfig, mesh: Mesh, tokens: int, dtype: torch.dtype) -> int:
    """What has come back from the experts in the earlier rounds of an all-to-all, at most: even routing has one."""
    if mesh.world_size == 1 or mesh.config.moe_dispatch != "all_to_all" or "sparse" not in config.mlp_layer_types:
        return 0
    rows = tokens * min(mesh.world_size, config.num_experts_per_tok)
    return rows * config.hidden_size * dtype.itemsize


def unfilled_bytes(config: ModelConfig, mesh: Mesh, tokens: int, dtype: torch.dtype) -> int:
    """What a round of a dispatch may take beyond one of even routing, which a given ``moe_chunk_size`` does not fit
    exactly: for each token-expert pair its rows between the products, and in an all-to-all at most a token that
    arrives and a sum, too."""
    size, k, chunk = mesh.world_size, config.num_experts_per_tok, mesh.config.moe_chunk_size
    if chunk is None or size == 1 or "sparse" not in config.mlp_layer_types:
        return 0
    even = tokens * k
    if mesh.config.moe_dispatch == "all_to_all":
        most, rounds, rows = max(chunk, size * (k + 1)), rounds_needed(even, chunk, size, k), 4
    else:
        most, rounds, rows = max(chunk, k), cdiv(even, chunk), 2
    more = max(0, min(most, size * even) - even // rounds)
    return more * (2 * config.moe_intermediate_size + rows * config.hidden_size) * dtype.itemsize


def _peak(mesh: Mesh, runner: ModelRunner, chunks: list[Chunk]) -> int:
    """Most bytes that are allocated at once while a step runs; its requests end with it."""
    device = mesh.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(runner.plan(chunks)).read()
    torch.cuda.synchronize(device)
    for chunk in chunks:
        chunk.request.finish_reason = "abort"  # others take their rows of tables
    return torch.cuda.max_memory_allocated(device)
