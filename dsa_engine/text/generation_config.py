"""The sampling that a model folder recommends, in its ``generation_config.json``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dsa_engine.config.model import read_object
from dsa_engine.errors import CheckpointError
from dsa_engine.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

# Keys that are read from the file, as in vLLM, and their names in SamplingParams. ``do_sample`` is ignored.
_NAMES = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
_NAMES["max_new_tokens"] = "max_tokens"


def default_sampling(folder: Path, generation_config: str) -> dict[str, Any]:
    """Parameters that apply if a call gives none; a log line lists those that the file sets. "auto" reads the file, if
    there is one; "vllm" only checks it."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    keys = read_object(path)
    sampling = {ours: keys[theirs] for theirs, ours in _NAMES.items() if keys.get(theirs) is not None}
    if generation_config == "vllm":
        return {}
    try:
        SamplingParams(**sampling)
    except (TypeError, ValueError) as error:
        advice = "mend it, or give generation_config='vllm' to do without its sampling parameters"
        raise CheckpointError(f"{path}: {error}; {advice}") from error
    if sampling:
        values = ", ".join(f"{name}={value}" for name, value in sampling.items())
        logger.info("%s sets the default sampling: %s (generation_config='vllm' does without)", path, values)
    return sampling
