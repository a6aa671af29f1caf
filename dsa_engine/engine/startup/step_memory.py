"""Memory of steps beside weights and caches, counted by running the largest steps before there are caches.

These steps have run every collective once, so NCCL has its buffers; cuBLAS has its workspaces and kernels are loaded.
So memory that is free afterwards stays free. Routing is forced to be even, which fills a round of a dispatch to its
limit (`parallel/experts/`): other routing takes more rounds, not more memory. Two amounts are added: the results of
earlier rounds, and rows that a given ``moe_chunk_size`` allows beyond even routing.
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
from dsa_engine.engine.steps.micro_batches import MicroBatches
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.moe import MoE
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.experts.all_to_all import rounds_needed
from dsa_engine.parallel.experts.rails import largest_groups
from dsa_engine.parallel.experts.traffic import RowBytes

# Memory of a captured graph outside of PyTorch's allocator, and of its buffers. Assumed, not measured: a kernel in a
# graph takes some KB, and a decode step of V3.2 has about 2,700 kernels.
GRAPH_BYTES = 32 << 20


def step_bytes(
    model: Model,
    stored: CacheFormat,
    options: EngineOptions,
    max_model_len: int,
    relaxed: RelaxedAcceptance | None,
    graphs: bool,
) -> int:
    """Maximum bytes that a step takes on the device beside weights and caches, graphs included; every rank calls it.

    Args:
        graphs: whether decode steps will be captured.

    Raises:
        CapacityError: the largest steps do not fit beside the weights.
    """
    config, mesh = model.config, model.runtime.mesh
    drafts = options.speculation.num_speculative_tokens if options.speculation else 0
    cache = KVCache(config.with_mtp(len(model.mtp)), stored, 1, options.page_size, mesh.device)
    contexts = ContextBuckets(max_model_len, options.page_size)
    padded = DecodeGraphs(model, cache, capture=False, contexts=contexts) if graphs else None
    runner = ModelRunner(model, cache, options.seed, padded, relaxed, MicroBatches.of(options, mesh))
    runner.num_drafts = drafts
    tokens, page_size = options.max_num_batched_tokens * mesh.cp_size, options.page_size
    kinds = (DRAWN, WITH_HOST) if drafts else (WITH_HOST,)  # with drafts the first is a graph, the second runs eagerly
    decodes = (decode_step(mesh, page_size, options.max_num_seqs, max_model_len, drafts, kind) for kind in kinds)
    before = torch.cuda.memory_allocated(mesh.device)
    try:
        with mesh.experts.even_routing():
            decode = max(_peak(mesh, runner, chunks) for chunks in decodes) - before
            # Tables of penalties and biases stay from step to step.
            tables = torch.cuda.memory_allocated(mesh.device) - before
            steps = prefill_steps(mesh, page_size, tokens, max_model_len, options.max_num_seqs, drafts)
            prefill = max(_peak(mesh, runner, chunks) for chunks in steps) - before
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the largest step does not fit beside the weights ({str(error).splitlines()[0]}); lower "
            "max_num_batched_tokens, max_num_seqs or workspace, or use more ranks"
        ) from error
    of_step = config, mesh, options.max_num_batched_tokens, runner.dtype
    more = [returned_bytes(*of_step, sends_words(model)), unfilled_bytes(*of_step)]
    largest = max(prefill + sum(more), decode)
    if not graphs:
        return largest
    # Twice: for the pool of the graphs, and for the warm-up on their stream.
    count = len(likely_buckets(mesh, options, max_model_len, drafts))
    return largest + 2 * (decode - tables) + count * GRAPH_BYTES


def sends_words(model: Model) -> bool:
    """Whether tokens travel to experts in another form than sums travel back."""
    token = torch.empty(1, model.config.hidden_size, dtype=model.runtime.dtype, device=model.runtime.mesh.device)
    experts = (layer.experts for layer in model.modules() if isinstance(layer, MoE))
    return any(one.quantize_for_dispatch(token).dtype != token.dtype for one in experts)


def returned_bytes(config: ModelConfig, mesh: Mesh, tokens: int, dtype: torch.dtype, words: bool = False) -> int:
    """Maximum bytes of experts' results from earlier rounds of a prefill dispatch; even routing has only one round.

    By node, the results of a round inside, and the rows along the rail: even routing sends a token to few nodes.
    All tokens gathered, the results replace the tokens, unless these are shorter.

    Args:
        words: see :func:`sends_words`.
    """
    size, k, groups = mesh.world_size, mesh.experts_per_token(config.num_experts_per_tok), mesh.node_groups
    method, chunk = mesh.config.moe_dispatch, mesh.config.moe_chunk_size
    if size == 1 or "sparse" not in config.mlp_layer_types:
        return 0
    row = RowBytes.of(config.hidden_size * dtype.itemsize, k)
    if method == "all_gather":
        return words * tokens * size * row.back
    direct = tokens * min(size, k) * row.back
    if method == "all_to_all" or groups is None:
        return direct
    rail, node = largest_groups(groups.nodes)
    bound = max(tokens * k if chunk is None else chunk, max(rail, node) * (k + 1))  # pairs that a round brings
    # Rows of both micro-batches of a step may be on their way at once.
    sent, brought = tokens * min(len(set(groups.nodes)), k), min(2 * bound, rail * tokens)
    by_node = (sent + brought) * row.there + (sent + bound) * row.back
    return max(direct, by_node)


def unfilled_bytes(config: ModelConfig, mesh: Mesh, tokens: int, dtype: torch.dtype) -> int:
    """Maximum bytes that a round of a dispatch takes beyond a round of even routing, if ``moe_chunk_size`` is given.

    Each further token-expert pair takes its rows between the products, and in an all-to-all at most a token that
    arrives and a sum.
    """
    size, k, chunk = mesh.world_size, mesh.experts_per_token(config.num_experts_per_tok), mesh.config.moe_chunk_size
    if chunk is None or size == 1 or "sparse" not in config.mlp_layer_types:
        return 0
    even = tokens * k
    if mesh.config.moe_dispatch != "all_gather":
        limit, rounds, rows = max(chunk, size * (k + 1)), rounds_needed(even, chunk, size, k), 4
    else:
        limit, rounds, rows = max(chunk, k), cdiv(even, chunk), 2
    rows += mesh.config.moe_combine_dtype == "fp8"  # codes beside sums
    more = max(0, min(limit, size * even) - even // rounds)
    return more * (2 * config.moe_intermediate_size + rows * config.hidden_size) * dtype.itemsize


def _peak(mesh: Mesh, runner: ModelRunner, chunks: list[Chunk]) -> int:
    """Maximum bytes allocated at once while a step runs; ends its requests."""
    device = mesh.device
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    runner.launch(runner.plan(chunks)).read()
    torch.cuda.synchronize(device)
    for chunk in chunks:
        chunk.request.finish_reason = "abort"  # frees their rows of tables
    return torch.cuda.max_memory_allocated(device)
