"""What the log says when an engine has started: what was loaded, what the caches hold, what is done without and why."""

from __future__ import annotations

import logging
from pathlib import Path

from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.dense_attention import flash_attn_3_varlen_func, flash_attn_varlen_func
from dsa_engine.quantization import Unquantized, word_for
from dsa_engine.sizes import format_bytes

logger = logging.getLogger(__name__)


def log_start(engine: Engine, folder: Path) -> None:
    """A line for the weights, one for the caches, and one for each thing that this run does without unasked."""
    options, cache, ranks = engine.options, engine.cache, engine.mesh.world_size
    where = f"{str(engine.dtype).removeprefix('torch.')} on {engine.mesh.device}"
    if options.load_format == "dummy":
        logger.info("%s: random weights made in %.1f s, %s", folder, engine.load_seconds, where)
    else:
        read = f"{format_bytes(engine.bytes_read)} in {engine.load_seconds:.1f} s"
        logger.info("%s: weights loaded on this rank, %s, %s", folder, read, where)
    tokens = cache.pages * cache.page_size
    logger.info(
        "cache of each rank: %s tokens in pages of %s, %s%s; room for %.2f requests of max_model_len %s on %s rank(s)",
        f"{tokens:,}",
        cache.page_size,
        format_bytes(cache.bytes),
        " in FP8" if cache.format.fp8 else "",
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
    options, stored = engine.options, word_for(engine.config.quantization)
    if stored and isinstance(engine.model.runtime.weights, Unquantized):
        why = "" if options.quantization else f": {engine.mesh.device} does not multiply them"
        logger.info("the checkpoint's %s weights are expanded on load%s", stored, why)
    if engine.mesh.device.type != "cuda":
        if options.device == "auto":
            logger.info("no CUDA device is available: operations run in PyTorch on the CPU, not as Triton kernels")
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
