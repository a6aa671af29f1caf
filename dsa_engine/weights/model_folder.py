"""Finds the folder of a model: a path, a hub id in the local Hugging Face cache, or a demo model."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from pathlib import Path
from typing import Any

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import HUB_IDS, RELEASED_CONFIGS, released_config
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.runtime.cpu import user_cache
from dsa_engine.system.output_files import write_text

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

logger = logging.getLogger(__name__)


def resolve_model(model: str | Path, dummy: bool = False) -> Path:
    """The folder of a model; nothing is ever downloaded.

    Args:
        model: a Hugging Face folder; a hub id (``deepseek-ai/DeepSeek-V3.2-Exp``), looked up in the local cache;
            "demo", which comes with the package; or "demo-random", which is made on first use.
        dummy: a name of ``RELEASED_CONFIGS``, such as "deepseek_v32", is a folder too: one without weights.

    Raises:
        CheckpointError: a file was given, a hub id that is not in the cache, or the name of a released configuration
            without ``dummy``; the text says what to do.
    """
    name = str(model)
    if name in ("demo", "demo-random"):
        from dsa_engine.demo import demo_folder, trained_folder  # only demo models need this import

        return trained_folder() if name == "demo" else demo_folder()
    path = Path(model).expanduser()
    if path.is_file():
        raise CheckpointError(_about_a_file(path))
    if name in RELEASED_CONFIGS and not path.is_dir():
        if not dummy:
            advice = "give load_format='dummy' for random weights, or the folder of a checkpoint"
            raise CheckpointError(f"{name!r} is a configuration without weights: {advice}")
        return _released_folder(name)
    if path.is_dir() or not _HUB_ID.fullmatch(name):
        return path  # if there is no such folder, reading config.json says so
    return _in_hub_cache(name)


def model_config(model: str, overrides: dict[str, Any]) -> ModelConfig:
    """The configuration of a model: one that :func:`resolve_model` finds, or a released one by its name or hub id."""
    try:
        folder = resolve_model(model)
    except CheckpointError:
        if model not in HUB_IDS and model not in RELEASED_CONFIGS:
            raise
        return ModelConfig.from_dict(released_config(model), overrides)
    return ModelConfig.from_pretrained(folder, overrides)


def _released_folder(name: str) -> Path:
    """The folder with ``config.json`` of a released model, in the cache folder; written on first use."""
    text = json.dumps(released_config(name), indent=2)
    try:
        folder = user_cache() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").is_file():
            write_text(folder / "config.json", text)  # whole: other processes may do the same
    except OSError as error:
        raise CheckpointError(f"{error}; set DSA_ENGINE_CACHE to a folder of yours") from error
    return folder


def _about_a_file(path: Path) -> str:
    if path.suffix == ".gguf":
        original = "the folder of the original checkpoint (config.json and *.safetensors)"
        return f"{path} is a GGUF file, which is not read here; give {original}"
    return f"{path} is a file; give the folder that it lies in: {path.parent}"


def _in_hub_cache(hub_id: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError, ValueError) as error:
        raise CheckpointError(
            f"no such model folder: {hub_id}, and the Hugging Face cache ({constants.HF_HUB_CACHE}) does not have it; "
            f"give the path of a folder, or get the model first: hf download {hub_id}"
        ) from error
    logger.info("%s is %s", hub_id, folder)
    return folder
