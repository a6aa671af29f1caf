"""From options to what an engine runs on: ranks, weights, checked kernels, caches that fit, a runner with its graphs.

The order matters. Caches get what is left when everything else has taken its memory, so the largest steps have run by
then (`step_memory.py`); graphs hold addresses of caches, so they come last (`capture.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dsa_engine.engine.agreement import start_facts
from dsa_engine.engine.context_buckets import ContextBuckets
from dsa_engine.engine.decode_graphs import DecodeGraphs
from dsa_engine.engine.kernel_check import check_kernels
from dsa_engine.engine.load_weights import load_weights, mtp_modules, refuse_extra_layers
from dsa_engine.engine.memory import affordable_pages, default_workspace, enough_memory
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.scheduler import Scheduler
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.step_memory import step_bytes
from dsa_engine.model.config import DTYPES, ModelConfig
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model.model import Model
from dsa_engine.model.runtime import Runtime
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.progress import progress_bar
from dsa_engine.quantization import weight_format
from dsa_engine.sizes import parse_bytes

# How long the ranks wait for the one whose disk is slowest: longer than for a collective (`ParallelConfig.timeout`).
_LOADING_S = 7200.0


@dataclass
class Started:
    """What :func:`start` has made."""

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype  # of activations
    workspace: int  # bytes
    max_model_len: int
    model: Model
    cache: KVCache
    scheduler: Scheduler
    graphs: DecodeGraphs | None
    runner: ModelRunner
    bytes_read: int
    load_seconds: float
    step_bytes: int | None  # set aside for steps and graphs; None where the caches were given their size


def start(folder: Path, options: EngineOptions) -> Started:
    """See :class:`.engine.Engine`; every rank calls it."""
    config = ModelConfig.from_pretrained(folder, options.hf_overrides)
    refuse_extra_layers(folder, config, options)
    modules = mtp_modules(folder, config, options)
    relaxed = RelaxedAcceptance.of(options.speculation, folder, options.trust_remote_code)
    max_model_len = _max_model_len(config, options)
    mesh = options.parallel.create_mesh(options.device, partial(start_facts, folder, options))
    dtype = DTYPES.get(options.dtype, config.dtype if mesh.device.type == "cuda" else torch.float32)
    stored = cache_format(config, cache_dtype(options.kv_cache_dtype, dtype))  # refused before anything loads
    workspace = (
        default_workspace(mesh.device) if options.workspace is None else parse_bytes(options.workspace, "workspace")
    )

    begun = time.perf_counter()
    with torch.inference_mode():
        runtime = Runtime(
            mesh,
            dtype,
            weight_format(config.quantization, options.quantization, dtype, mesh.device),
            workspace,
            options.max_num_batched_tokens,
            options.overlap_shared_expert,
            options.overlap_indexer,
        )
        with enough_memory("the weights of this rank", "use more ranks, another dtype, or fewer layers"):
            model = Model(config, runtime, modules)
        bytes_read = load_weights(model, folder, options, progress_of(mesh, options))
    load_seconds = time.perf_counter() - begun
    mesh.meet(_LOADING_S)
    by_reference = check_kernels(model, config, mesh, stored, options)
    captures = mesh.device.type == "cuda" and not options.enforce_eager and not by_reference
    for_steps = None
    if mesh.device.type == "cuda" and options.cache_memory is None:
        static = captures and mesh.static_decode
        for_steps = step_bytes(model, config, mesh, stored, options, max_model_len, relaxed, static)
    cached = config.with_mtp(modules)
    pages = affordable_pages(options, mesh, max_model_len, cache_bytes_per_token(cached, stored), for_steps or 0)
    with enough_memory("the caches", "lower cache_memory"):
        cache = KVCache(cached, stored, pages, options.page_size, mesh.device)
    scheduler = Scheduler(
        rank=mesh.rank,
        world_size=mesh.world_size,
        cp_size=mesh.cp_size,
        pages=cache.pages,
        page_size=options.page_size,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_share=options.max_prefill_share,
    )
    contexts = ContextBuckets(max_model_len, options.page_size)
    graphs = DecodeGraphs(model, cache, config, mesh, contexts=contexts) if captures else None
    runner = ModelRunner(model, cache, config, mesh, options.seed, graphs, relaxed=relaxed)
    return Started(
        config=config,
        mesh=mesh,
        dtype=dtype,
        workspace=workspace,
        max_model_len=max_model_len,
        model=model,
        cache=cache,
        scheduler=scheduler,
        graphs=graphs,
        runner=runner,
        bytes_read=bytes_read,
        load_seconds=load_seconds,
        step_bytes=for_steps,
    )


def progress_of(mesh: Mesh, options: EngineOptions) -> Callable[..., Any]:
    """``progress(total, unit, title, shown=True)``, see :func:`progress_bar`; only on rank 0, and where it was not
    turned off."""

    def progress(total: int, unit: str, title: str, shown: bool = True) -> Any:
        return progress_bar(total, unit, title, shown and options.progress and mesh.rank == 0)

    return progress


def _max_model_len(config: ModelConfig, options: EngineOptions) -> int:
    most = options.max_model_len or config.max_position_embeddings
    if most > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {most} exceeds the model's {config.max_position_embeddings} positions; "
            "lower it, or raise max_position_embeddings with hf_overrides"
        )
    return most
