"""Folders with the configuration of a released model and nothing else, for ``load_format="dummy"``."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from dsa_engine.config.released import released_config
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.runtime.cpu import user_cache
from dsa_engine.system.output_files import write_text


def released_folder(name: str) -> Path:
    """The folder with ``config.json`` of a released model, in the cache folder; written on first use.

    Args:
        name: a key of ``RELEASED_CONFIGS``.

    Raises:
        CheckpointError: the cache folder cannot be written.
    """
    text = json.dumps(released_config(name), indent=2)
    try:
        folder = user_cache() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        path = folder / "config.json"
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, text)  # whole: other processes may do the same
    except OSError as error:
        raise CheckpointError(f"{error}; set DSA_ENGINE_CACHE to a folder of yours") from error
    return folder
