"""From options to an engine: ranks, weights, check of kernels, caches that fit, a runner with its graphs; and its log.

The order matters. Caches get the memory that everything else leaves free, so the largest steps run before they are made
(``step_memory.py``). Graphs contain addresses of caches, so they are captured last (``capture.py``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsa_engine.checkpoint.part_digests import PartDigests
from dsa_engine.config.model import DTYPES, ModelConfig
from dsa_engine.engine.agreement import start_facts
from dsa_engine.engine.cache.sizes import TierSizes, page_folder
from dsa_engine.engine.cache.turns import CacheTurns
from dsa_engine.engine.disaggregation.side import Side, own_options
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.load_recorder import LoadRecorder, check_record, count_loads
from dsa_engine.engine.rebalancing import Rebalancing
from dsa_engine.engine.requests.capacity import Capacity
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.startup.capture import capture_likely
from dsa_engine.engine.startup.kernel_check import check_kernels
from dsa_engine.engine.startup.memory import affordable_pages, default_workspace, enough_memory
from dsa_engine.engine.startup.same_weights import compare_weights
from dsa_engine.engine.startup.step_memory import step_bytes
from dsa_engine.engine.startup.weights import load_weights, mtp_modules, refuse_extra_layers
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.micro_batches import MicroBatches
from dsa_engine.kernels.attention.dense_attention import flash_attn_3_varlen_func, flash_attn_varlen_func
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model.model import Model
from dsa_engine.model.runtime import Runtime
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.quantization import Unquantized, quantization_name, weight_format
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsa_engine.engine.cache.kv_events import KVEvents

logger = logging.getLogger(__name__)

# Longest wait for the rank with the slowest disk: longer than for a collective (`ParallelConfig.timeout`).
_LOADING_S = 7200.0


def start(folder: Path, options: EngineOptions) -> Engine:
    """Loads a model, makes its caches and captures the likely graphs; every rank calls it.

    Args:
        folder: a Hugging Face model folder; with ``load_format="dummy"`` its ``config.json`` is enough.

    Raises:
        CheckpointError, CapacityError, ValueError: see :class:`dsa_engine.LLM`.
    """
    config = ModelConfig.from_pretrained(folder, options.hf_overrides)
    refuse_extra_layers(folder, config, options)
    modules = mtp_modules(folder, config, options)
    relaxed = RelaxedAcceptance.of(options.speculation, folder, options.trust_remote_code)
    max_model_len = limited_model_len(config, options)
    same, options = partial(start_facts, folder, options), own_options(options)
    mesh = create_mesh(options.parallel, options.device, same)
    check_record(mesh)
    events = _kv_events(options, mesh)
    dtype = DTYPES.get(options.dtype, config.dtype if mesh.device.type == "cuda" else torch.float32)
    stored = cache_format(config, cache_dtype(options.kv_cache_dtype, dtype))  # raises before anything loads
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
        )
        replicas = options.parallel.redundant_experts
        fewer = f"lower redundant_experts {replicas}, or use" if replicas else "use"
        with enough_memory("the weights of this rank", f"{fewer} more ranks, another dtype, or fewer layers"):
            model = Model(config, runtime, modules)
        digests = PartDigests() if not mesh.host.alone and options.load_format != "dummy" else None
        bytes_read = load_weights(model, folder, options, progress_of(mesh, options), digests)
    load_seconds = time.perf_counter() - begun
    mesh.barrier(_LOADING_S)
    if digests is not None:
        compare_weights(mesh, folder, digests, load_seconds)
    model.loads = count_loads(model, folder.name)
    rebalancing = Rebalancing.of(model)
    waits = check_kernels(model, stored, options)
    cached = config.with_mtp(modules)
    sizes = TierSizes.of(options, mesh, cached, stored, max_model_len)
    sizes.warm_up(mesh)
    side = Side.of(options, mesh, modules)
    captures = mesh.device.type == "cuda" and not options.enforce_eager and not waits and not (side and side.prefills)
    for_steps = None
    if mesh.device.type == "cuda" and options.cache_memory is None:
        static = captures and mesh.static_decode
        for_steps = step_bytes(model, stored, options, max_model_len, relaxed, static)
    beside = (for_steps or 0) + sizes.device_bytes(mesh, cached, stored, options.page_size)
    beside += side.device_bytes(cached, stored, options.page_size) if side else 0
    pages = affordable_pages(options, mesh, max_model_len, cache_bytes_per_token(cached, stored), beside)
    with enough_memory("the caches", "lower cache_memory"):
        cache = KVCache(cached, stored, pages, options.page_size, mesh.device)
    transfer = sizes.transfer(cache, mesh)
    if side:
        side.connect(cache, len(model.layers))
    scheduler = (side.scheduler if side else Scheduler)(
        Capacity(mesh.world_size, mesh.cp_size, cache.pages, options.page_size),
        rank=mesh.rank,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_share=options.max_prefill_share,
        enable_prefix_caching=options.enable_prefix_caching,
        host_pages=sizes.host,
        max_fetched_pages=sizes.exchanged,
    )
    contexts = ContextBuckets(max_model_len, options.page_size)
    graphs = DecodeGraphs(model, cache, contexts=contexts) if captures else None
    runner = ModelRunner(model, cache, options.seed, graphs, relaxed, MicroBatches.of(options, mesh))
    pages_on_disk = page_folder(options, folder, model, stored)
    turns = CacheTurns(scheduler, mesh, transfer, pages_on_disk, side.sender if side else None)
    engine = Engine(
        options=options,
        model=model,
        cache=cache,
        scheduler=scheduler,
        runner=runner,
        cache_turns=turns,
        max_model_len=max_model_len,
        progress=progress_of(mesh, options),
        bytes_read=bytes_read,
        load_seconds=load_seconds,
        step_bytes=for_steps,
    )
    if side:
        side.attach(engine)
    if graphs is not None and mesh.static_decode:
        capture_likely(runner, mesh, options, max_model_len, engine.progress)
    if model.loads is not None:
        model.loads.forget()  # those of steps that were no requests'
    engine.rebalancing, engine.recorder = rebalancing, LoadRecorder.of(model)
    if events is not None:
        events.follow(scheduler)
    return engine


def _kv_events(options: EngineOptions, mesh: Mesh) -> KVEvents | None:
    """What publishes the events of the prefix cache, on rank 0 if they are wanted."""
    wanted = options.kv_events_config or {}
    if not wanted.get("enable_kv_cache_events") or not mesh.is_front:
        return None
    from dsa_engine.engine.cache.kv_events import KVEvents  # needs packages of the extra "serve"

    return KVEvents(wanted)


def progress_of(mesh: Mesh, options: EngineOptions) -> Callable[..., Any]:
    """``progress(total, unit, title, shown=True)``, see :func:`progress_bar`; only rank 0 shows bars, if any."""

    def progress(total: int, unit: str, title: str, shown: bool = True) -> Any:
        return progress_bar(total, unit, title, shown and options.progress and mesh.is_front)

    return progress


def limited_model_len(config: ModelConfig, options: EngineOptions) -> int:
    """Maximum number of tokens of a request; raises ``ValueError`` if the option exceeds the model's positions."""
    wanted = options.max_model_len or config.max_position_embeddings
    if wanted > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {wanted} exceeds the model's {config.max_position_embeddings} positions; "
            "lower it, or raise max_position_embeddings with hf_overrides"
        )
    return wanted


def log_start(engine: Engine, folder: Path) -> None:
    """Logs a line for the weights, one for the caches, and one for each slower path taken by default."""
    options, cache, ranks = engine.options, engine.cache, engine.mesh.world_size
    where = f"{str(engine.dtype).removeprefix('torch.')} on {engine.mesh.device}"
    if options.load_format == "dummy":
        logger.info("%s: random weights made in %.1f s, %s", folder, engine.load_seconds, where)
    else:
        read = f"{format_bytes(engine.bytes_read)} in {engine.load_seconds:.1f} s"
        logger.info("%s: weights loaded on this rank, %s, %s", folder, read, where)
    tokens = cache.pages * cache.page_size
    logger.info(
        "cache of each rank: %s tokens in pages of %s, %s%s%s; room for %.2f requests of max_model_len %s "
        "on %s rank(s)",
        f"{tokens:,}",
        cache.page_size,
        format_bytes(cache.bytes),
        " in FP8" if cache.format.fp8 else "",
        "" if engine.mesh.device.type == "cuda" else " (a limit: memory is taken as it fills)",
        ranks * tokens / engine.max_model_len,
        f"{engine.max_model_len:,}",
        ranks,
    )
    if engine.step_bytes is not None:
        logger.info("set aside for steps and graphs: %s", format_bytes(engine.step_bytes))
    if engine.graphs is not None and engine.graphs.captured:
        held = format_bytes(engine.graphs.memory_bytes)
        logger.info("%s CUDA graphs captured, which hold %s", len(engine.graphs.captured), held)
    _log_fallbacks(engine)


def _log_fallbacks(engine: Engine) -> None:
    options, stored = engine.options, quantization_name(engine.config.quantization)
    if stored and isinstance(engine.model.runtime.weights, Unquantized):
        why = "" if options.quantization else f": {engine.mesh.device} does not multiply them"
        logger.info("the checkpoint's %s weights are expanded on load%s", stored, why)
    if engine.mesh.device.type != "cuda":
        if options.device == "auto":
            logger.info("no CUDA device is available: the model runs on the CPU, in C++ kernels and PyTorch")
        if options.dtype == "auto" and engine.dtype != engine.config.dtype:
            stored = str(engine.config.dtype).removeprefix("torch.")
            logger.info("dtype 'auto' is float32 on a CPU; the checkpoint says %s", stored)
        return
    if flash_attn_varlen_func is None and flash_attn_3_varlen_func is None:
        logger.info("flash-attn is not installed: PyTorch's attention does its work where tokens see few others")
    lost = ["CUDA graphs"] if not options.enforce_eager else []
    lost += ["async scheduling"] if options.async_scheduling else []
    if lost and not engine.mesh.static_decode:
        logger.warning(
            "decode runs without %s, as shapes change from step to step with decode_dispatch '%s'; 'all_gather' keeps "
            "them",
            " and ".join(lost),
            options.parallel.decode_dispatch,
        )
