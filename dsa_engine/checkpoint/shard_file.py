"""One safetensors file: its header, and parts of its tensors.

The file is read, not mapped: if it becomes shorter meanwhile, a read says so, and a mapping kills the process (SIGBUS).
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dsa_engine.errors import CheckpointError

# safetensors' names for the dtypes that a checkpoint may hold.
STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_LONGEST_HEADER = 100_000_000  # bytes; as the safetensors library has it
_LENGTH = 8  # bytes before the header
_AT_ONCE = 1 << 30  # bytes of one read; Linux returns fewer than 2 GiB
_ROWS_AT_ONCE = 1 << 20  # bytes of rows of which some columns are wanted


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: safetensors' name of its dtype, its shape, and its offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class ShardFile:
    """An open file.

    Attributes:
        tensors: by name.

    Raises:
        CheckpointError: the file is missing, not a file, truncated or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._file = _open(path)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()

    def read(self, name: str, into: torch.Tensor, start: tuple[int, ...]) -> None:
        """Fills ``into``, a contiguous CPU tensor of the stored dtype with as many dimensions as the stored one (1 or
        2), with the part that begins at ``start``.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        stored, raw = self.tensors[name], into.view(torch.uint8)
        row = math.prod(stored.shape[1:]) * into.element_size()  # bytes
        offset = stored.offset + start[0] * row
        if into.shape[1:] == stored.shape[1:]:
            self._fill(raw.reshape(-1).numpy().data, offset, name)
            return
        # Whole rows, as a read for each would take longer, and the system reads the bytes between them anyway.
        first = sum(start[1:]) * into.element_size()
        for some in raw.split(max(1, _ROWS_AT_ONCE // row)):
            rows = torch.empty(some.shape[0], row, dtype=torch.uint8)
            self._fill(rows.reshape(-1).numpy().data, offset, name)
            some.copy_(rows[:, first : first + some.shape[1]])
            offset += rows.numel()

    def _fill(self, data: memoryview, offset: int, what: str) -> None:
        position = 0
        while position < len(data):
            try:
                count = os.preadv(self._file, [data[position : position + _AT_ONCE]], offset + position)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot read {what!r}: {error.strerror or error}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.path} ends before the end of {what!r}, after {offset + position:,} bytes: it has become "
                    "shorter since it was opened; does another program write or download it?"
                )
            position += count

    def _read_header(self) -> dict[str, StoredTensor]:
        size, start = os.fstat(self._file).st_size, bytearray(_LENGTH)
        try:
            if size < _LENGTH:
                raise ValueError(f"{size} bytes")
            self._fill(memoryview(start), 0, "its header")
            length = int.from_bytes(start, "little")
            if length > min(size - _LENGTH, _LONGEST_HEADER):
                raise ValueError(f"its header of {length:,} bytes does not fit in it")
            text = bytearray(length)
            self._fill(memoryview(text), _LENGTH, "its header")
            return _parse_header(json.loads(text), _LENGTH + length, size)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CheckpointError):
                raise
            if start == b"version ":
                raise CheckpointError(f"{self.path} is a git-lfs pointer; run `git lfs pull` in its folder") from error
            raise CheckpointError(
                f"{self.path} is truncated or damaged ({error}); download it again, or for LLM('demo') install "
                "dsa-engine again"
            ) from error


def _open(path: Path) -> int:
    """A descriptor of a regular file; a FIFO or a device is not waited for."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; download the checkpoint again, or its missing files") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror or error}") from error
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        kind = "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise CheckpointError(f"{path} is {kind}, not a file; put the checkpoint's file there")
    return file


def _parse_header(header: dict[str, Any], start: int, size: int) -> dict[str, StoredTensor]:
    """The tensors of a header; they must fill the bytes from ``start`` to ``size`` without a gap.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: they do not, or it is no header.
    """
    tensors, spans = {}, []
    for name, about in header.items():
        if name == "__metadata__":
            continue
        first, last = about["data_offsets"]
        stored = StoredTensor(about["dtype"], tuple(about["shape"]), start + first)
        if any(type(number) is not int or number < 0 for number in (first, last, *stored.shape)):
            raise ValueError(f"offsets or shape of {name!r}")
        dtype = STORED_DTYPES.get(stored.dtype)
        if dtype is not None and last - first != math.prod(stored.shape) * dtype.itemsize:
            raise ValueError(f"{name!r} has {last - first:,} bytes, its shape {list(stored.shape)} needs others")
        tensors[name] = stored
        spans.append((first, last))
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError("its tensors overlap or leave a gap")
        end = last
    if start + end != size:
        raise ValueError(f"{size:,} bytes where its header says {start + end:,}")
    return tensors
