"""Writes a checkpoint folder with one shard in memory at a time; the target appears when it is complete.

All tensors are announced first, so that the names of the shards are known. The folder is built under a temporary name
beside the target and renamed at the end; what a killed process leaves ("….incomplete-…") may be deleted.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from dsa_engine.errors import CheckpointError
from dsa_engine.system.sizes import format_bytes, parse_bytes
from dsa_engine.weights.index import INDEX_NAME
from dsa_engine.weights.tensors import TensorSpec

DEFAULT_SHARD_SIZE = "5GB"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WrittenCheckpoint:
    """The folder, files and tensors of a finished run."""

    folder: Path
    shards: int
    tensors: int
    tensor_bytes: int
    dequantized: int = 0  # FP8 weights that a conversion expanded
    quantized: int = 0  # weights that a conversion quantised

    def to_json(self) -> dict[str, Any]:
        return {
            "folder": str(self.folder),
            "files": self.shards,
            "tensors": self.tensors,
            "dequantized": self.dequantized,
            "quantized": self.quantized,
            "bytes": self.tensor_bytes,
        }


class SafetensorsWriter:
    """Streams tensors into ``target``; use it as a context manager, which finishes, or cleans up after an exception.

    ::

        with SafetensorsWriter("out", specs) as writer:
            for spec in specs:
                writer.write(spec.name, make(spec))
            writer.add_file("config.json", text)
        writer.written.tensor_bytes

    Args:
        target: the folder to make; it must not exist, or be empty.
        tensors: all tensors, in the order in which they will be written.
        max_shard_size: bytes, or text such as "5GB" or "512MiB"; a larger tensor gets its own shard. Memory holds
            about one shard.
    """

    def __init__(
        self, target: str | Path, tensors: Iterable[TensorSpec], *, max_shard_size: int | str = DEFAULT_SHARD_SIZE
    ):
        from huggingface_hub import split_state_dict_into_shards_factory  # only writing needs it

        self.target = Path(os.path.abspath(target))
        self._specs = {spec.name: spec for spec in tensors}
        self._split = split_state_dict_into_shards_factory(
            self._specs,
            get_storage_size=lambda spec: spec.nbytes,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=parse_bytes(max_shard_size, "max_shard_size"),
        )
        total, shards = self._split.metadata["total_size"], len(self._split.filename_to_tensors)
        self.written = WrittenCheckpoint(self.target, shards, len(self._specs), total)
        self._unwritten = {file: set(names) for file, names in self._split.filename_to_tensors.items()}
        self._held: dict[str, dict[str, torch.Tensor]] = {file: {} for file in self._unwritten}
        self._extra: dict[str, bytes | Path] = {}
        self._refuse_existing()
        self.target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.target.parent).free
        if total > free:
            raise CheckpointError(f"{self.target} needs {total:,} bytes, but its disk has only {free:,} bytes free")
        size = f"{format_bytes(total)} in {shards:,} file(s) of weights"
        logger.info("writing %s: %s; %s are free", self.target, size, format_bytes(free))
        self._temporary = self.target.with_name(f"{self.target.name}.incomplete-{uuid.uuid4().hex[:8]}")

    def __enter__(self) -> SafetensorsWriter:
        return self  # the folder is made in the block: a signal that comes here would leave it

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes an announced tensor, with the last one of its shard that shard."""
        spec, file = self._specs.get(name), self._split.tensor_to_filename.get(name, "")
        if (
            spec is None
            or name not in self._unwritten[file]
            or (spec.shape, spec.dtype) != (tensor.shape, tensor.dtype)
        ):
            raise ValueError(f"announced is {spec}, not {name!r} {list(tensor.shape)} {tensor.dtype}")
        self._temporary.mkdir(exist_ok=True)
        self._held[file][name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self._unwritten[file].remove(name)
        if self._unwritten[file]:
            return
        try:
            save_file(self._held.pop(file), self._temporary / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot write {self.target / file}: {error}; make room, or give a folder on another disk"
            ) from error

    def add_file(self, name: str, content: str | bytes | Path) -> None:
        """Adds a small file (config.json, tokenizer files): its text, its bytes, or the path of a file to copy.

        Such files are written last, as a folder without config.json is no checkpoint.
        """
        self._extra[name] = content.encode() if isinstance(content, str) else content

    def _finish(self) -> None:
        missing = sorted(name for names in self._unwritten.values() for name in names)
        if missing:
            raise ValueError(
                f"{len(missing)} of {self.written.tensors} tensors were not written, such as {missing[0]!r}"
            )
        self._temporary.mkdir(exist_ok=True)
        if self.written.shards > 1:
            weight_map = dict(sorted(self._split.tensor_to_filename.items()))
            index = {"metadata": self._split.metadata, "weight_map": weight_map}
            self.add_file(INDEX_NAME, json.dumps(index, indent=2) + "\n")
        for name, content in self._extra.items():
            if isinstance(content, Path):
                shutil.copyfile(content, self._temporary / name)
            else:
                (self._temporary / name).write_bytes(content)
        try:
            os.rename(self._temporary, self.target)  # replaces an empty folder, refuses any other
        except OSError:
            self._refuse_existing()  # another process has made it
            raise

    def _refuse_existing(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir() or any(self.target.iterdir()):
            raise CheckpointError(f"{self.target} exists and is not an empty folder; remove it, or give another")
