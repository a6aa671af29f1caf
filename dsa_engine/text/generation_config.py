"""The sampling that a model folder recommends, in its ``generation_config.json``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from dsa_engine.config.checks import is_integer, shown
from dsa_engine.errors import CheckpointError
from dsa_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# What is taken of the file, as by vLLM, and what SamplingParams call it. ``do_sample`` is none of it.
_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"


def default_sampling(folder: Path, generation_config: str) -> dict[str, Any]:
    """Parameters that apply where a user gives none; a log line says which the file has set.

    Args:
        folder: of the model.
        generation_config: "auto" reads the file, if there is one; "vllm" checks it only.

    Raises:
        CheckpointError: the file is damaged or has values that are not possible.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        keys = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(keys, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {shown(keys)}")
    ends = keys.get("eos_token_id")
    if ends is not None and not all(is_integer(i) and i >= 0 for i in (ends if isinstance(ends, list) else [ends])):
        raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, not {shown(ends)}")
    found = {ours: keys[theirs] for theirs, ours in _NAMES.items() if keys.get(theirs) is not None}
    if generation_config == "vllm":
        return {}
    try:
        SamplingParams(**found)
    except (TypeError, ValueError) as error:
        advice = "mend it, or give generation_config='vllm' to do without its sampling parameters"
        raise CheckpointError(f"{path}: {error}; {advice}") from error
    if found:
        values = ", ".join(f"{name}={value}" for name, value in found.items())
        logger.info("%s sets the default sampling: %s (generation_config='vllm' does without)", path, values)
    return found
