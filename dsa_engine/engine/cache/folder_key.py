"""What pages of a model depend on: equal keys mean equal rows, whatever the number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from dsa_engine.checkpoint.index import locate_tensors, open_shard
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.page_file import VERSION
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.options import EngineOptions
from dsa_engine.version import __version__

_SAMPLE = 64  # bytes of every tensor


class FolderKey(NamedTuple):
    """The name of a model's subfolder, and what it stands for."""

    name: str
    about: dict[str, object]

    @classmethod
    def of(
        cls,
        folder: Path,
        options: EngineOptions,
        config: ModelConfig,
        format: CacheFormat,
        dtype: torch.dtype,
        weights: str,
        lookahead: int,
    ) -> FolderKey:
        """Makes the key of an engine.

        Args:
            format, dtype, weights: those of the caches, of activations, and of the weights in memory.
            lookahead: number of MTP modules that write rows.
        """
        about: dict[str, object] = {
            "model": str(options.model),
            "model_type": config.model_type,
            "configuration": _digest([repr(config)]),
            "checkpoint": _random_weights(options) if options.load_format == "dummy" else checkpoint_digest(folder),
            "weights": weights,
            "dtype": str(dtype).removeprefix("torch."),
            "cache": repr(format),
            "page_size": options.page_size,
            "mtp_modules": lookahead,
            "format": VERSION,
            "dsa_engine": __version__,
        }
        facts = {name: value for name, value in about.items() if name != "model"}
        return cls(_digest([json.dumps(facts, sort_keys=True)]), about)


def checkpoint_digest(folder: Path) -> str:
    """A digest of names, types and shapes of all tensors, and of 64 bytes in the middle of each.

    A fine-tuned model has other bytes nearly everywhere, so it has another digest. A change of single numbers
    is not noticed, nor is a damaged byte.

    Raises:
        CheckpointError: see :func:`.locate_tensors`.
    """
    files = sorted(set(locate_tensors(folder).values()))
    return _digest(text for path in files for text in _samples(path))


def _samples(path: Path) -> Iterable[str]:
    yield f"{path.name} {path.stat().st_size}"
    shard = open_shard(path)
    for name in sorted(shard.keys()):
        tensor = shard.get_tensor(name)  # a view of the file
        raw = tensor.reshape(-1).view(torch.uint8)
        sample = raw[max(0, (raw.numel() - _SAMPLE) // 2) :][:_SAMPLE]
        yield f"{name} {tensor.dtype} {tuple(tensor.shape)} {sample.numpy().tobytes().hex()}"


def _random_weights(options: EngineOptions) -> str:
    return f"random, seed {options.seed}"


def _digest(texts: Iterable[str]) -> str:
    digest = blake2b(digest_size=16)
    for text in texts:
        digest.update(text.encode() + b"\n")
    return digest.hexdigest()
