"""Fills a model with its weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsa_engine.checkpoint import CheckpointReader, DummyReader
from dsa_engine.checkpoint.index import locate_tensors
from dsa_engine.model.config import ModelConfig, read_config_json
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions


def refuse_extra_layers(folder: Path, config: ModelConfig, options: EngineOptions) -> None:
    """``ValueError`` where ``hf_overrides`` ask for more layers than the checkpoint has.

    The layer behind the last one in a checkpoint is its MTP module: it would load, and be wrong.
    """
    layers = read_config_json(folder).get("num_hidden_layers")
    if options.load_format == "auto" and isinstance(layers, int) and config.num_hidden_layers > layers:
        raise ValueError(
            f"hf_overrides ask for {config.num_hidden_layers} layers, the checkpoint has {layers}; "
            "ask for fewer, or use load_format='dummy'"
        )


def mtp_modules(folder: Path, config: ModelConfig, options: EngineOptions) -> int:
    """How many MTP modules draft; ``ValueError`` where the checkpoint lacks those that ``speculative_config`` asks
    for."""
    speculation = options.speculation
    if speculation is None:
        return 0
    there, layers = config.num_nextn_predict_layers, config.num_hidden_layers
    modules = speculation.modules(there)
    if options.max_num_batched_tokens < modules:
        raise ValueError(
            f"max_num_batched_tokens {options.max_num_batched_tokens} is too small: {modules} MTP modules take as many "
            "tokens of a prompt in a step; raise it, or lower num_speculative_tokens"
        )
    if options.load_format == "dummy":
        return modules
    stored = read_config_json(folder).get("num_hidden_layers")
    if stored != layers:
        raise ValueError(
            f"speculative_config: with num_hidden_layers {layers} of {stored} the MTP module would draft for another "
            "model; take all layers, or load_format='dummy'"
        )
    names = locate_tensors(folder)
    for layer in range(layers, layers + modules):
        if f"model.layers.{layer}.eh_proj.weight" not in names:
            raise ValueError(
                f"speculative_config: config.json promises {there} MTP module(s), but {folder} does not hold layer "
                f"{layer}; take a checkpoint that has it, or no speculative_config"
            )
    return modules


def load_weights(model: Model, folder: Path, options: EngineOptions, progress: Callable[[int, str, str], Any]) -> int:
    """Loads this rank's weights; returns the bytes that it read.

    Args:
        model: its tensors are filled.
        folder: of the checkpoint.
        options: of the engine; its ``load_format`` and ``seed``.
        progress: makes a progress bar of a total, a unit and a title.
    """
    sources = list(model.weight_sources())
    dummy = options.load_format == "dummy"
    reader = DummyReader(options.seed) if dummy else CheckpointReader(folder, model.config.weight_block_size)
    with progress(len(sources), "tensors", "loading") as bar:
        for source in sources:
            reader.load(source)
            bar.update()
    if isinstance(reader, CheckpointReader):
        reader.close()
    model.weights_loaded()
    return reader.bytes_read
