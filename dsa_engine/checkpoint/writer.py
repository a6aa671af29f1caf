"""Writes a checkpoint folder with one tensor in memory at a time; the target appears when it is complete.

All tensors are announced first, so that a shard's header (`shards.py`) can be written before their data. The folder is
built under a temporary name beside the target and renamed at the end. An interrupted resumable run keeps that folder
with the finished shards.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import torch

from dsa_engine.checkpoint.checksums import checksums_of
from dsa_engine.checkpoint.index import INDEX_NAME
from dsa_engine.checkpoint.leftovers import remove_leftovers, temporary_name
from dsa_engine.checkpoint.resume import ResumableFolder
from dsa_engine.checkpoint.shards import Shard, plan_shards
from dsa_engine.checkpoint.tensor_spec import TensorSpec
from dsa_engine.errors import CheckpointError
from dsa_engine.system.interrupts import uninterrupted
from dsa_engine.system.sizes import format_bytes, parse_bytes

DEFAULT_SHARD_SIZE = "5GB"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

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
        max_shard_size: bytes, or text such as "5GB" or "512MiB"; a larger tensor gets its own shard.
        checksums: name of a last file, JSON, with the SHA-256 of every other file by name.
        resume: text that identifies what is written, with every option. Finished shards of an interrupted run with the
            same text are used again, and :meth:`done` tells their tensors. None: an interrupted run is discarded.

    Raises:
        CheckpointError: the target exists and is not empty, its disk has too little room, or (on entering) another
            process writes the same checkpoint.
        ValueError: no tensors, a name given twice, a dtype that cannot be stored, or a bad shard size.
    """

    def __init__(
        self,
        target: str | Path,
        tensors: Iterable[TensorSpec],
        *,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        checksums: str | None = None,
        resume: str | None = None,
    ):
        self.target = Path(os.path.abspath(target))
        limit = parse_bytes(max_shard_size, "max_shard_size")
        self._refuse_existing()
        self._shards = plan_shards(tensors, limit)
        specs = [spec for shard in self._shards for spec in shard.specs]
        total = sum(spec.nbytes for spec in specs)
        self.written = WrittenCheckpoint(self.target, len(self._shards), len(specs), total)
        self._resumable = None if resume is None else ResumableFolder(self.target, f"{resume}\n{self._shards}")
        finished = [shard for shard in self._shards if self._resumable and self._resumable.finished(shard.name)]
        self._finished_names = {spec.name for shard in finished for spec in shard.specs}
        remaining = [spec for spec in specs if spec.name not in self._finished_names]
        self._expected = iter(remaining)
        self._to_write = len(remaining)
        self._shard_of = {spec.name: shard for shard in self._shards for spec in shard.specs}
        self._current: Shard | None = None
        self._file: BinaryIO | None = None
        self._offsets: dict[str, int] = {}
        self._extra: dict[str, bytes | Path] = {}
        self._checksums = checksums
        self.target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self.target)
        free = shutil.disk_usage(self.target.parent).free
        needed = sum(spec.nbytes for spec in remaining)
        if needed > free:
            raise CheckpointError(f"{self.target} needs {needed:,} bytes, but its disk has only {free:,} bytes free")
        size = f"{format_bytes(total)} in {len(self._shards):,} file(s) of weights"
        logger.info("writing %s: %s; %s are free", self.target, size, format_bytes(free))
        if finished:
            message = "an interrupted run is continued: %s of %s file(s) are in %s"
            logger.info(
                message, f"{len(finished):,}", f"{len(self._shards):,}", self._resumable and self._resumable.path
            )
        self._temporary = self._resumable.path if self._resumable else temporary_name(self.target)

    def __enter__(self) -> SafetensorsWriter:
        if self._resumable:
            self._resumable.enter()
        else:
            self._temporary.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            try:
                if self._file is not None:
                    with suppress(OSError):  # a full disk raises again when buffers are flushed
                        self._file.close()
            finally:
                with uninterrupted():
                    self._clean_up()

    def _clean_up(self) -> None:
        """Removes the temporary folder unless it can be resumed; :meth:`_finish` has renamed that of a finished run."""
        finished = sum(self._resumable.finished(shard.name) for shard in self._shards) if self._resumable else 0
        if not finished:
            shutil.rmtree(self._temporary, ignore_errors=True)
        elif self._temporary.exists():
            message = "%s of %s file(s) stay in %s; the same command goes on after them"
            logger.info(message, f"{finished:,}", f"{len(self._shards):,}", self._temporary)
        if self._resumable:
            self._resumable.leave()

    def done(self, name: str) -> bool:
        """Whether an earlier run has written this tensor, which must then not be written again."""
        return name in self._finished_names

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the next announced tensor.

        Raises:
            ValueError: its name, shape or dtype differs from what was announced.
            CheckpointError: the file cannot be written, for instance on a full disk.
        """
        spec = next(self._expected, None)
        given = (name, tuple(tensor.shape), tensor.dtype)
        if spec is None or given != (spec.name, spec.shape, spec.dtype):
            wanted = "no further tensor" if spec is None else f"{spec.name!r} {list(spec.shape)} {spec.dtype}"
            raise ValueError(f"announced next is {wanted}, not {name!r} {list(tensor.shape)} {tensor.dtype}")
        shard = self._shard_of[name]
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        if shard is not self._current:
            self._close_shard()
            self._open(shard)
        with self._named(shard.name):
            assert self._file is not None
            self._file.seek(self._offsets[name])
            self._file.write(data)
        self._to_write -= 1

    def add_file(self, name: str, content: str | bytes | Path) -> None:
        """Adds a small file (config.json, tokenizer files): its text, its bytes, or the path of a file to copy.

        Such files are written last, as a folder without config.json is no checkpoint.
        """
        if Path(name).name != name:
            raise ValueError(f"a file name without folders is needed, not {name!r}")
        self._extra[name] = content.encode() if isinstance(content, str) else content

    @contextmanager
    def _named(self, file: str) -> Iterator[None]:
        """Turns an ``OSError`` into an error that names the file and says what to do."""
        try:
            yield
        except OSError as error:
            advice = "; make room or give a folder on another disk" if error.errno in _FULL else ""
            raise CheckpointError(f"cannot write {self.target / file}: {error.strerror or error}{advice}") from error

    def _open(self, shard: Shard) -> None:
        header, self._offsets, size = shard.layout()
        with self._named(shard.name):
            path = self._resumable.unfinished(shard.name) if self._resumable else self._temporary / shard.name
            self._file = path.open("wb")
            self._current = shard
            self._file.write(header)
            self._file.truncate(size)

    def _close_shard(self) -> None:
        if self._file is not None and self._current is not None:
            with self._named(self._current.name):
                _sync_and_close(self._file)
                if self._resumable:
                    self._resumable.finish(self._current.name)
            self._file = None

    def _finish(self) -> None:
        if self._to_write:
            following = next(self._expected).name
            raise ValueError(
                f"{self._to_write} of {self.written.tensors} tensors were not written, the next is {following!r}"
            )
        self._close_shard()
        if len(self._shards) > 1:
            weight_map = {name: shard.name for name, shard in sorted(self._shard_of.items())}
            index = {"metadata": {"total_size": self.written.tensor_bytes}, "weight_map": weight_map}
            self._extra[INDEX_NAME] = (json.dumps(index, indent=2) + "\n").encode()
        for name, content in self._extra.items():
            self._write_small(name, content.read_bytes() if isinstance(content, Path) else content)
        if self._checksums:
            self._write_small(self._checksums, checksums_of(self._temporary))
        if self._resumable:
            self._resumable.tidy()
        _sync_folder(self._temporary)
        try:
            os.rename(self._temporary, self.target)  # replaces an empty folder, refuses any other
        except OSError:
            self._refuse_existing()  # another process has made it
            raise
        _sync_folder(self.target.parent)

    def _write_small(self, name: str, data: bytes) -> None:
        with self._named(name), (self._temporary / name).open("wb") as file:
            file.write(data)
            _sync_and_close(file)

    def _refuse_existing(self) -> None:
        if not self.target.exists():
            return
        if not self.target.is_dir() or any(self.target.iterdir()):
            raise CheckpointError(f"{self.target} exists and is not an empty folder; remove it, or give another")


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
