"""What a model and its options must be, and its weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dsa_engine.config.model import ModelConfig, read_config_json
from dsa_engine.errors import enough_memory
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.model import Model, MTPModule
from dsa_engine.model.runtime import Runtime
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.system.sizes import format_bytes, parse_bytes
from dsa_engine.weights import CheckpointReader, DummyReader
from dsa_engine.weights.formats import weight_format
from dsa_engine.weights.index import locate_tensors


def limited_model_len(config: ModelConfig, options: EngineOptions) -> int:
    """Maximum number of tokens of a request; raises ``ValueError`` if the option exceeds the model's positions."""
    wanted = options.max_model_len or config.max_position_embeddings
    if wanted > config.max_position_embeddings:
        raise ValueError(
            f"max_model_len {wanted} exceeds the model's {config.max_position_embeddings} positions; "
            "lower it, or raise max_position_embeddings with hf_overrides"
        )
    return wanted


def refuse_extra_layers(folder: Path, config: ModelConfig, options: EngineOptions) -> None:
    """Raises ``ValueError`` if ``hf_overrides`` ask for more layers than the checkpoint has.

    The layer after the last one in a checkpoint is its MTP module: it would load, and be wrong.
    """
    layers = read_config_json(folder).get("num_hidden_layers")
    if options.load_format == "auto" and isinstance(layers, int) and config.num_hidden_layers > layers:
        raise ValueError(
            f"hf_overrides ask for {config.num_hidden_layers} layers, the checkpoint has {layers}; "
            "ask for fewer, or use load_format='dummy'"
        )


def refuse_variant(options: EngineOptions, device: torch.device, dtype: torch.dtype) -> None:
    """Refuses, with ``batch_invariant``, what computes a row by what runs beside it."""
    if not options.batch_invariant:
        return
    parallel, speculation = options.parallel, options.speculation
    on_cpu = device.type == "cpu" and not INTERPRETED
    refused = {
        'kernels "reference"': (options.kernels == "reference", "PyTorch's products add by the number of rows"),
        'moe_combine_dtype "fp8"': (parallel.moe_combine_dtype == "fp8", "only sums that travel are rounded to it"),
        f"dcp_size {parallel.dcp_size}": (
            parallel.dcp_size > 1,
            "a sum over tokens has a part for each rank, by where their pages lie",
        ),
        "speculative_config relaxed_topk": (
            speculation is not None and speculation.relaxed_topk > 0,
            "drafts choose tokens, and how many there are follows from the batch",
        ),
        f"dtype {str(dtype).removeprefix('torch.')!r} on a CPU": (
            on_cpu and dtype not in cpu.TYPES,
            f"its kernels take {', '.join(str(one) for one in cpu.TYPES)}",
        ),
        "a CPU without its compiled kernels": (
            on_cpu and cpu.library() is None,
            "PyTorch's products add by the number of rows; install a C++ compiler, and do not set DSA_ENGINE_NATIVE=0",
        ),
    }
    for what, (given, why) in refused.items():
        if given:
            raise ValueError(
                f"batch_invariant does not go with {what}: {why}; change that, or leave batch_invariant out"
            )


def refuse_hot_rows(options: EngineOptions, config: ModelConfig) -> None:
    """Raises ``ValueError`` if ``hot_rows`` are too few, or layers select none that they could hold. ``config``: with
    the MTP modules that draft."""
    # Rows of a request in a step, and in a pass of several modules that draft (``passes.py``).
    several = len(config.indexer_types) - config.num_hidden_layers > 1
    rows = max(1 + options.num_drafts, 2 * options.num_drafts if several else 0)
    least = rows * config.index_topk
    if options.hot_rows and "none" in config.indexer_types:
        raise ValueError(
            f"hot_rows is {options.hot_rows}, and {config.model_type!r} has layers that read all tokens of a context: "
            "they select none that hot rows could hold; leave hot_rows out"
        )
    if 0 < options.hot_rows < least:
        raise ValueError(
            f"hot_rows is {options.hot_rows}: a step selects index_topk {config.index_topk} rows for a token, and "
            f"computes up to {rows} of a request with {options.num_drafts} drafts; give at least {least}, or 0 to keep "
            "all rows on the device"
        )


def why_dense(folder: Path, config: ModelConfig, options: EngineOptions, max_model_len: int) -> str | None:
    """Why the indexer is never used, although the checkpoint has one; None if it is, or there is none."""
    if config.has_indexer:
        if max_model_len > config.index_topk:
            return None
        return f"no request of at most {max_model_len} tokens sees more than index_topk {config.index_topk}"
    names = locate_tensors(folder) if options.load_format == "auto" else {}
    unread = next((name for name in names if ".indexer." in name), None)
    return unread and f"the checkpoint has {unread}, and model_type {config.model_type!r} of config.json has no indexer"


def mtp_modules(folder: Path, config: ModelConfig, options: EngineOptions) -> int:
    """Number of MTP modules that draft."""
    speculation = options.speculation
    if speculation is None:
        return 0
    modules, layers = speculation.modules(config.num_nextn_predict_layers), config.num_hidden_layers
    if options.max_num_batched_tokens < modules:
        raise ValueError(
            f"max_num_batched_tokens {options.max_num_batched_tokens} is too small: {modules} MTP modules take as many "
            "tokens of a prompt in a step; raise it, or lower num_speculative_tokens"
        )
    if options.load_format == "dummy":
        return modules
    names = locate_tensors(folder)
    for layer in range(layers, layers + modules):  # with fewer hidden layers than the checkpoint's this is none either
        if f"model.layers.{layer}.eh_proj.weight" not in names:
            raise ValueError(
                f"speculative_config: layer {layer} of {folder} is no MTP module; take all layers of a checkpoint that "
                "has its MTP modules, or no speculative_config"
            )
    return modules


@torch.inference_mode()
def load_model(
    folder: Path,
    config: ModelConfig,
    mesh: Mesh,
    options: EngineOptions,
    dtype: torch.dtype,
    modules: int,
    progress: Callable[[int, str, str], Any],
) -> tuple[Model, int]:
    """Makes a model with ``modules`` MTP modules and loads this rank's weights; returns the model and the number of
    bytes read. ``progress`` makes a progress bar from a total, a unit and a title."""
    workspace = (1 << 30) if mesh.device.type == "cuda" else (256 << 20)
    if options.workspace is not None:
        workspace = parse_bytes(options.workspace, "workspace")
    weights = weight_format(config.quantization, options.quantization, dtype, mesh.device)
    runtime = Runtime(mesh, dtype, weights, workspace, options.max_num_batched_tokens)
    replicas = options.parallel.redundant_experts
    fewer = f"lower redundant_experts {replicas}, or use" if replicas else "use"
    with enough_memory("the weights of this rank", f"{fewer} more ranks, another dtype, or fewer layers"):
        model = Model(config, runtime, modules)
    return model, load_weights(model, folder, options, progress)


def load_weights(model: Model, folder: Path, options: EngineOptions, progress: Callable[[int, str, str], Any]) -> int:
    """Loads this rank's weights; returns the number of bytes read."""
    sources = list(model.weight_sources())
    dummy = options.load_format == "dummy"
    reader = DummyReader(options.seed) if dummy else CheckpointReader(folder, model.config.weight_block_size)
    with progress(sum(source.into.nbytes for source in sources), "B", "loading weights") as bar:
        for source in sources:
            reader.load(source)
            bar.update(source.into.nbytes)
    if isinstance(reader, CheckpointReader):
        _load_own_tables(model, reader)
        model.unread = reader.names() - reader.names_read
        reader.close()
    model.weights_loaded()
    return reader.bytes_read


def _load_own_tables(model: Model, reader: CheckpointReader) -> None:
    """Gives MTP modules the checkpoint's embedding and head for them, if these differ from the model's.

    In the released checkpoints they are copies: they are read, compared, and take no memory. They may differ after
    further training of the model or the modules, and drafts would be bad without them.
    """
    sources = {source.name: source for source in model.sources}
    embedding = sources["model.embed_tokens.weight"]
    head = sources.get("lm_head.weight", embedding)  # tied
    for module in model.mtp:
        assert isinstance(module, MTPModule)
        for name, shared, rows in (("embed_tokens", embedding, model.embed), ("shared_head.head", head, model.lm_head)):
            source = replace(shared, name=f"{module.prefix}.{name}.weight")
            if source.name not in reader.names():
                continue
            table = torch.zeros_like(rows, device="cpu")  # with the padding of the model's
            reader.load(replace(source, into=table[: len(shared.into)]))
            if torch.equal(table, rows.cpu()):
                continue
            module.set_own(name, table.to(rows.device))
            message = "%s differs from the model's: the MTP module has its own, %s on this rank"
            logging.getLogger(__name__).info(message, source.name, format_bytes(table.nbytes))
