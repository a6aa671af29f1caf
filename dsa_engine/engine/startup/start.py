"""From options to an engine, in five functions: each takes what the ones before it have returned.

The order matters. Caches get the memory that everything else leaves free, so the largest steps run before they are made
(``warm_up.py``). Graphs contain addresses of caches, so they are captured last.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsa_engine.config.model import DTYPES, ModelConfig
from dsa_engine.engine.cache.link import PageSender
from dsa_engine.engine.cache.sizes import TierSizes, affordable_pages, page_folder
from dsa_engine.engine.cache.steps import CacheSteps
from dsa_engine.engine.disaggregation.side import Side, own_options
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.sampling.grammar import GrammarMasks
from dsa_engine.engine.speculation.acceptance import RelaxedAcceptance
from dsa_engine.engine.startup.choice import chosen_options
from dsa_engine.engine.startup.kernel_check import check_kernels
from dsa_engine.engine.startup.start_facts import start_facts
from dsa_engine.engine.startup.warm_up import GREEDY, DummySteps, connect, step_bytes
from dsa_engine.engine.startup.weights import (
    limited_model_len,
    load_model,
    mtp_modules,
    refuse_extra_layers,
    refuse_hot_rows,
    refuse_variant,
    why_dense,
)
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.micro_batches import MicroBatches
from dsa_engine.engine.steps.rebalancing import CountRecorder, Rebalancing, count_loads
from dsa_engine.errors import enough_memory
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.linear.linear import FEW_ROWS_ON_A_CPU
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.integers import cdiv, next_power_of_2
from dsa_engine.model.indexer import Indexer
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts import KINDS
from dsa_engine.parallel.experts.dispatch import ModelSizes
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.progress import progress_bar
from dsa_engine.system.sizes import format_bytes
from dsa_engine.text.tokenizer import Tokenizer
from dsa_engine.weights.formats import Unquantized, quantization_name

if TYPE_CHECKING:
    from dsa_engine.engine.cache.kv_events import KVEvents

logger = logging.getLogger(__name__)

_LOADING_S = 7200.0  # longest wait for the rank with the slowest disk


def start(folder: Path, options: EngineOptions) -> tuple[Engine, Side | None]:
    """Loads a model, makes its caches and captures the likely graphs; every rank calls it.

    Args:
        folder: a Hugging Face model folder; with ``load_format="dummy"`` its ``config.json`` is enough.

    Returns:
        the engine, and with ``prefill_ranks`` this rank's side of the run, for its loop.

    Raises:
        CheckpointError, CapacityError, ValueError: see :class:`dsa_engine.LLM`.
    """
    prepared = prepare(folder, options)
    together = partial(prepared.mesh.together, wait_s=_LOADING_S)
    loaded = together(partial(load, prepared))
    sized = together(partial(size, prepared, loaded))
    fewest = sized.side.fewest(sized.pages * prepared.mesh.dcp.size) if sized.side else None
    engine = together(partial(make, prepared, loaded, sized, fewest))
    capture(prepared, engine)
    return engine, sized.side


@dataclass(frozen=True)
class Prepared:
    """What runs, and where."""

    folder: Path  # the model's
    options: EngineOptions  # those of this rank's part of the run
    config: ModelConfig  # the model's; ``cached`` has its MTP modules as further layers
    modules: int  # number of MTP modules that draft
    relaxed: RelaxedAcceptance | None
    max_model_len: int
    mesh: Mesh
    dtype: torch.dtype
    format: CacheFormat  # of the caches
    events: KVEvents | None  # publishes what the prefix cache holds, on rank 0 if that is wanted

    @property
    def cached(self) -> ModelConfig:
        return self.config.with_mtp(self.modules)

    @property
    def dummy_steps(self) -> DummySteps:
        return DummySteps(self.mesh, self.options, self.max_model_len, self.options.num_drafts)

    @property
    def on_cuda(self) -> bool:
        return self.mesh.device.type == "cuda"

    def progress(self, total: int | None, unit: str, title: str, shown: bool = True) -> Any:
        """See :func:`progress_bar`; only rank 0 shows bars, if any."""
        return progress_bar(total, unit, title, shown and self.options.progress and self.mesh.is_front)


@dataclass(frozen=True)
class Loaded:
    """A model with its weights."""

    model: Model
    rebalancing: Rebalancing | None  # this and the next by the loads of its experts, if options ask for them
    recorder: CountRecorder | None
    bytes_read: int  # this and the next: what loading took on this rank
    seconds: float


@dataclass(frozen=True)
class Sized:
    """What the caches get."""

    pages: int  # of each rank's cache
    tiers: TierSizes  # pages beside the device
    side: Side | None  # this rank's side of a disaggregated run
    captures: bool  # whether decode steps run as CUDA graphs, or as recordings
    step_bytes: int | None  # set aside on the device for steps and graphs; None if an option set the size of the caches


def prepare(folder: Path, options: EngineOptions) -> Prepared:
    """Reads the configuration and joins the other ranks; refuses what is impossible before anything is loaded."""
    config = ModelConfig.from_pretrained(folder, options.hf_overrides)
    refuse_extra_layers(folder, config, options)
    modules, max_model_len = mtp_modules(folder, config, options), limited_model_len(config, options)
    relaxed = RelaxedAcceptance.of(options.speculation, folder, options.trust_remote_code)
    device = choose_device(options.device, one_part=options.parallel.prefill_ranks is None)
    dtype = DTYPES.get(options.dtype, config.dtype if device.type == "cuda" else torch.float32)
    refuse_variant(options, device, dtype)
    refuse_hot_rows(options, config.with_mtp(modules))
    config = replace(config, batch_invariant=options.batch_invariant)
    options = chosen_options(options, config.with_mtp(modules), max_model_len, device, dtype)
    same, options = partial(start_facts, folder, options), own_options(options)
    mesh, wanted = create_mesh(options.parallel, options.device, same), options.kv_events_config or {}
    format = cache_format(config, cache_dtype(options.kv_cache_dtype, dtype))

    def of_one_rank() -> KVEvents | None:
        mesh.experts.prepare(_sizes(mesh, config, options, dtype))
        check_outputs(options.parallel.record_expert_loads if mesh.is_leader else None)
        if wanted.get("enable_kv_cache_events") and mesh.is_front:
            from dsa_engine.engine.cache.kv_events import KVEvents  # needs packages of the extra "serve"

            return KVEvents(wanted, options.page_size)
        return None

    events = mesh.together(of_one_rank, options.parallel.timeout)
    return Prepared(folder, options, config, modules, relaxed, max_model_len, mesh, dtype, format, events)


def _sizes(mesh: Mesh, config: ModelConfig, options: EngineOptions, dtype: torch.dtype) -> ModelSizes:
    experts = config.n_routed_experts + mesh.config.redundant_experts
    rows = next_power_of_2(cdiv(options.max_num_seqs, mesh.world_size)) * (1 + options.num_drafts)
    return ModelSizes(config.hidden_size, experts, config.num_experts_per_tok, rows, dtype)


def load(prepared: Prepared) -> Loaded:
    """Loads this rank's weights; runs no collective, as ranks take different times."""
    options, mesh = prepared.options, prepared.mesh
    begun = time.perf_counter()
    arguments = prepared.config, mesh, options, prepared.dtype, prepared.modules
    model, bytes_read = load_model(prepared.folder, *arguments, prepared.progress)
    seconds = time.perf_counter() - begun
    how = "random weights made" if options.load_format == "dummy" else "weights loaded on this rank"
    what, dtype = f"{format_bytes(bytes_read)} in {seconds:.1f} s", str(prepared.dtype).removeprefix("torch.")
    logger.info("%s: %s, %s, %s on %s", prepared.folder, how, what, dtype, mesh.device)
    _log_slower_paths(prepared, model)
    recorder, every = count_loads(model, prepared.folder.name), mesh.config.rebalance_every
    rebalancing = None if every is None or model.loads is None else Rebalancing(model, every, model.loads.take)
    return Loaded(model, rebalancing, recorder, bytes_read, seconds)


def size(prepared: Prepared, loaded: Loaded) -> Sized:
    """Counts the memory that everything but the caches takes, and divides what is left into pages."""
    options, mesh, format, cached = prepared.options, prepared.mesh, prepared.format, prepared.cached
    waits = check_kernels(loaded.model, format, options, prepared.progress)
    repeats = prepared.on_cuda or _can_be_recorded(prepared, loaded.model)
    captures = repeats and not waits and not options.enforce_eager
    side = Side.of(options, mesh, prepared.modules)
    tiers = TierSizes.of(options, mesh, cached, format, prepared.max_model_len)
    tiers.warm_up(mesh)
    for_steps = None
    dummies = loaded.model, format, prepared.dummy_steps, prepared.relaxed, captures and mesh.static_decode
    if prepared.on_cuda and mesh.world_size > 1:
        connect(*dummies)
    if prepared.on_cuda and options.cache_memory is None:
        logger.info("running the largest steps, to count their memory")
        for_steps = step_bytes(*dummies)
        logger.info("set aside for steps and graphs: %s", format_bytes(for_steps))
    others = [for_steps or 0, tiers.device_bytes(mesh, cached, format, options.page_size)]
    others += [PageSender.device_bytes(cached, format, options.page_size)] if side else []
    token_bytes = cache_bytes_per_token(cached, format)
    if options.hot_rows:
        pages, tiers = tiers.with_hot_rows(options, mesh, cached, format, prepared.max_model_len, sum(others))
    else:
        pages = affordable_pages(options, mesh, prepared.max_model_len, token_bytes, sum(others))
    return Sized(pages, tiers, side, captures, for_steps)


def _can_be_recorded(prepared: Prepared, model: Model) -> bool:
    """Whether decode steps on a CPU can be recordings: no other process takes part, attention of all rows is one of the
    CPU's kernels, and rows that see few tokens may select."""
    selects = any(isinstance(module, Indexer) for module in model.modules())
    native = not prepared.format.coded and cpu.serves(torch.empty(0, dtype=prepared.dtype))
    return prepared.mesh.world_size == 1 and selects and native


def make(prepared: Prepared, loaded: Loaded, sized: Sized, fewest: int | None) -> Engine:
    """Makes the engine and its parts; ``fewest``: of the pages of all ranks, if one part prefills and one decodes."""
    options, mesh, model, side = prepared.options, prepared.mesh, loaded.model, sized.side
    with enough_memory("the caches", "lower cache_memory"):
        sizes = sized.pages, options.page_size, mesh.device, mesh.dcp
        hot = sized.tiers.spilled, sized.tiers.sets, options.hot_rows
        cache = KVCache(prepared.cached, prepared.format, *sizes, *hot)
    _log_cache(prepared, cache)
    transfer = sized.tiers.transfer(cache, mesh)
    if side:
        side.connect(cache, len(model.layers))
    scheduler = (side.scheduler if side else Scheduler)(
        Capacity(mesh.world_size, mesh.cp_size, cache.pages, options.page_size, mesh.dcp.size, fewest, *hot[:2]),
        rank=mesh.rank,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_prefill_share=options.max_prefill_share,
        enable_prefix_caching=options.enable_prefix_caching,
        host_pages=sized.tiers.host,
        max_fetched_pages=sized.tiers.exchanged,
        # Of which each rank has a layer's rows at a time.
        max_context=None if cache.group is None and not cache.spilled else prepared.max_model_len,
        eos_token_ids=prepared.config.eos_token_ids,
        events=prepared.events,
    )
    exact_rows, micro_batches = None if prepared.on_cuda else FEW_ROWS_ON_A_CPU, MicroBatches.of(options, mesh)
    contexts = ContextBuckets(prepared.max_model_len, options.page_size, exact_rows=exact_rows)
    graphs = DecodeGraphs(model, cache, contexts=contexts) if sized.captures else None
    config, trusts = prepared.config, options.trust_remote_code
    grammars = GrammarMasks(prepared.folder, trusts, config.vocab_size, config.eos_token_ids)
    if prepared.on_cuda and Tokenizer.lies_in(prepared.folder):
        grammars.load()  # seconds, for which streams would wait with the first request that has a grammar
    on_disk = page_folder(options, prepared.folder, model, prepared.format)
    moves = CacheSteps(scheduler, mesh, transfer, on_disk, side.sender if side else None) if transfer or side else None
    return Engine(
        options=options,
        model=model,
        cache=cache,
        scheduler=scheduler,
        runner=ModelRunner(model, cache, graphs, prepared.relaxed, micro_batches, grammars),
        cache_steps=moves,
        rebalancing=loaded.rebalancing,
        recorder=loaded.recorder,
        max_model_len=prepared.max_model_len,
        progress=prepared.progress,
        bytes_read=loaded.bytes_read,
        load_seconds=loaded.seconds,
        step_bytes=sized.step_bytes,
    )


def capture(prepared: Prepared, engine: Engine) -> None:
    """Captures the likely graphs; loads of experts are counted from then on."""
    graphs, loads = engine.graphs, engine.model.loads
    if graphs is not None and prepared.mesh.static_decode and prepared.on_cuda:
        runner, choices = engine.runner, engine.scheduler.decoding.draft_number.choices
        of_each = [replace(prepared.dummy_steps, num_drafts=number) for number in reversed(choices)]
        # Other graphs are captured when they first occur.
        buckets = [(steps, *bucket) for steps in of_each for bucket in steps.likely_buckets()]
        with prepared.progress(len(buckets), "graphs", "capturing") as bar:
            for steps, requests, context in buckets:
                runner.launch(runner.plan(steps.decode(requests, context, GREEDY))).read()
                bar.update(1)
        held = format_bytes(graphs.memory_bytes)
        logger.info("%s CUDA graphs captured, which hold %s", len(graphs.captured), held)
    if loads is not None:
        loads.forget()


def _log_cache(prepared: Prepared, cache: KVCache) -> None:
    tokens, ranks = (cache.pages + cache.spilled) * cache.page_size, prepared.mesh.world_size
    how = f" in {cache.format.name.upper()}" if cache.format.coded else ""
    limit = "" if prepared.on_cuda else " (a limit: memory is taken as it fills)"
    together = f", each {prepared.mesh.dcp.size} of which hold a request together" if prepared.mesh.dcp.size > 1 else ""
    spills = f", the latent rows of {cache.spilled * cache.page_size:,} in host memory" if cache.spilled else ""
    text = (
        f"cache of each rank: {tokens:,} tokens in pages of {cache.page_size}, {format_bytes(cache.bytes)}{how}{limit}"
        f"{spills}; room for {ranks * tokens / prepared.max_model_len:.2f} requests of max_model_len "
        f"{prepared.max_model_len:,} on {ranks} rank(s){together}"
    )
    logger.info("%s", text)


def _log_slower_paths(prepared: Prepared, model: Model) -> None:
    """Logs a line for each slower path taken by default, and one if the model's indexer is not used."""
    options, config, mesh = prepared.options, prepared.config, prepared.mesh
    if why := why_dense(prepared.folder, config, options, prepared.max_model_len):
        logger.warning("sparse attention is NOT in use, attention is dense: %s", why)
    stored = quantization_name(config.quantization)
    if stored and isinstance(model.runtime.weights, Unquantized):
        why = "" if options.quantization else f": {mesh.device} has no products of many rows in them"
        logger.info("the checkpoint's %s weights are expanded on load%s", stored, why)
    if not prepared.on_cuda:
        if options.device == "auto":
            logger.info("no CUDA device is available: the model runs on the CPU, in C++ kernels and PyTorch")
        if options.dtype == "auto" and prepared.dtype != config.dtype:
            given = str(config.dtype).removeprefix("torch.")
            logger.info("dtype 'auto' is float32 on a CPU; the checkpoint says %s", given)
        return
    lost = ["CUDA graphs"] * (not options.enforce_eager) + ["async scheduling"] * options.async_scheduling
    if lost and not mesh.static_decode:
        message = "decode runs without %s, as shapes change with decode_dispatch '%s'; %s keep them"
        others = " and ".join(f"'{name}'" for name, kind in KINDS.items() if kind.static_decode)
        logger.warning(message, " and ".join(lost), options.parallel.decode_dispatch, others)
