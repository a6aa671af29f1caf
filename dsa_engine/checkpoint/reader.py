"""Reads this rank's part of each tensor from safetensors files directly into the model's parameters.

Only the bytes of that part are read. FP8 blocks are expanded on the way into a parameter of plain numbers; a parameter
of codes takes the stored bytes. No copy is larger than ``CHUNK_ELEMENTS``, so that loading a checkpoint needs no more
memory than the model.
"""

from __future__ import annotations

import math
from collections.abc import KeysView
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from dsa_engine.checkpoint.index import locate_tensors
from dsa_engine.checkpoint.part_digests import Part, PartDigests
from dsa_engine.checkpoint.shard_file import STORED_DTYPES, ShardFile, StoredTensor
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.fp8 import dequantize_blocks
from dsa_engine.kernels.runtime.integers import cdiv

SCALE_SUFFIX = "_scale_inv"
CHUNK_ELEMENTS = 1 << 24  # a temporary of at most 64 MiB in float32
_CACHED = 1 << 19  # bytes of a temporary that stays in a core's cache


@dataclass(frozen=True)
class Source:
    """The tensor, or part of one, that fills a parameter."""

    name: str  # tensor name in the checkpoint
    into: torch.Tensor  # 1-D or 2-D, filled in place in its dtype, on its device; its shape is that of the part
    shape: tuple[int, ...]  # the full shape that the checkpoint must hold
    start: tuple[int, ...] = ()  # start of the part in every dimension; () is the origin
    scale_of: torch.dtype | None = (
        None  # for a scale, which must be positive: the dtype of the codes that it multiplies
    )
    without: str = ""  # name of a tensor that would give this one another meaning: the checkpoint must not hold it

    @property
    def holds_codes(self) -> bool:
        """Whether ``into`` takes the stored bytes: codes, which mean nothing without their scales."""
        return not self.into.is_floating_point() or self.into.dtype == torch.float8_e4m3fn

    def __post_init__(self) -> None:
        start = self.start or (0,) * len(self.shape)
        object.__setattr__(self, "start", start)
        if len(self.shape) not in (1, 2) or not len(self.shape) == len(start) == self.into.dim():
            raise ValueError(
                f"{self.name}: shape {list(self.shape)}, start {list(start)} and the destination "
                f"{list(self.into.shape)} must all have one dimension, or all two"
            )
        if any(s < 0 or s + n > full for s, n, full in zip(start, self.into.shape, self.shape, strict=True)):
            part = f"a part {list(self.into.shape)} at {list(start)}"
            raise ValueError(f"{self.name}: {part} does not lie inside {list(self.shape)}")


class Reader(Protocol):
    """The interface of a reader: :class:`CheckpointReader`, or :class:`.dummy.DummyReader`."""

    bytes_read: int

    def load(self, source: Source) -> None: ...


class CheckpointReader:
    """The tensors of a folder of safetensors files, which are opened on demand and closed by :meth:`close`.

    Args:
        folder: holds ``model.safetensors.index.json`` and its shards, or ``model.safetensors``, or any
            ``*.safetensors``.
        block_size: rows and columns that share one FP8 scale (``ModelConfig.weight_block_size``), or None.
        digests: gets every part that is read.

    Raises:
        CheckpointError: no safetensors files, or an index that is not valid.
    """

    def __init__(
        self, folder: str | Path, block_size: tuple[int, int] | None = None, digests: PartDigests | None = None
    ):
        self.folder = Path(folder)
        self.block_size = block_size
        self.bytes_read = 0  # bytes of weights and scales read so far
        self._digests = digests
        self._open: dict[Path, ShardFile] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._file_of = locate_tensors(self.folder)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def names(self) -> KeysView[str]:
        return self._file_of.keys()

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The stored shape and dtype of a tensor; see :meth:`load` for errors."""
        stored = self._stored(name)
        return stored.shape, self._dtype(name, stored)

    def read_start(self, part: Part, count: int) -> torch.Tensor:
        """The first elements of a part, at most ``count`` of its first row; they count as neither read nor digested."""
        stored = self._stored(part.name)
        size = (1, min(count, part.size[1])) if len(part.size) == 2 else (min(count, part.size[0]),)
        into = torch.empty(size, dtype=self._dtype(part.name, stored))
        self._open[self._file_of[part.name]].read(part.name, into, part.start)
        return into

    def load(self, source: Source) -> None:
        """Fills ``source.into``.

        Raises:
            CheckpointError: the tensor or its file is missing, damaged, or not what the configuration says.
        """
        stored = self._stored(source.name)
        if source.without in self._file_of:
            raise CheckpointError(
                f"{self._file_of[source.without]}: {source.without!r} is stored, but quantization_config in "
                "config.json does not say so (weights.actorder: 'group'); get both files from the same place"
            )
        self._check_shape(source.name, stored, source.shape)
        dtype = self._dtype(source.name, stored)
        self._check_kind(source, dtype)
        scaled = dtype == torch.float8_e4m3fn and not source.holds_codes
        if scaled:
            self._check_block_scales(source)
        if source.into.numel() == 0:
            return
        # Chunks end at block borders, so that no scale is read twice.
        row_elements = math.prod(source.into.shape[1:])
        rows_per_chunk = max(CHUNK_ELEMENTS // row_elements, 1)
        block_rows = self.block_size[0] if scaled and self.block_size is not None else 1
        first, end = source.start[0], source.start[0] + source.into.shape[0]
        while first < end:
            last = min((first + rows_per_chunk) // block_rows * block_rows, end)
            if last <= first:  # a block has more rows than a chunk
                last = min(first // block_rows * block_rows + block_rows, end)
            self._load_rows(source, scaled, first, last)
            first = last

    def _load_rows(self, source: Source, scaled: bool, first: int, last: int) -> None:
        """Reads rows ``first`` to ``last`` of the whole tensor into their rows of ``source.into``."""
        into = source.into[first - source.start[0] : last - source.start[0]]
        if not scaled:
            part = self._read(source.name, (first, *source.start[1:]), tuple(into.shape))
            into.copy_(part)
            if source.holds_codes:
                self._check_codes(source.name, part)
            elif source.scale_of is not None:
                self._check_scales(source.name, into)
            else:
                self._check_finite(source.name, into)
            return
        assert self.block_size is not None
        start = first, source.start[1]
        name = source.name + SCALE_SUFFIX
        blocks = [
            (offset // block, cdiv(offset + size, block) - offset // block)
            for offset, size, block in zip(start, into.shape, self.block_size, strict=True)
        ]
        stored = self._read(name, tuple(first for first, _ in blocks), tuple(count for _, count in blocks))
        scale_inv = stored.to(torch.float32, copy=True)
        self._check_scales(name, scale_inv)
        part = self._read(source.name, start, tuple(into.shape))
        # For a GPU, the FP8 bytes cross the bus and are expanded on the device.
        into.copy_(dequantize_blocks(part.to(into.device), scale_inv.to(into.device), self.block_size, start))
        self._check_finite(source.name, into)

    def _check_kind(self, source: Source, stored: torch.dtype) -> None:
        """Checks that codes are stored where codes are expected, and floating point numbers elsewhere."""
        what = f"{self._file_of[source.name]}: {source.name!r}"
        if source.holds_codes and stored != source.into.dtype:
            raise CheckpointError(
                f"{what} is {stored}, where config.json's quantization_config says {source.into.dtype}; name it there "
                "among the modules that are not quantised, or load with quantization='dequantize'"
            )
        if source.scale_of is not None and (stored == torch.float8_e4m3fn or not stored.is_floating_point):
            raise CheckpointError(f"{what} has dtype {stored}; scales must be float32")
        if not source.holds_codes and not stored.is_floating_point:
            raise CheckpointError(f"{what} is {stored}, where config.json implies plain numbers")

    def _check_scales(self, name: str, scales: torch.Tensor) -> None:
        good = (scales > 0) & scales.isfinite()
        if not bool(good.all()):
            raise CheckpointError(
                f"{self._file_of[name]}: {name!r} holds the scale {scales[~good][0].item()}; scales must be finite and "
                "above 0: the file is damaged, get it again"
            )

    def _check_codes(self, name: str, codes: torch.Tensor) -> None:
        """Refuses NaN among e4m3 codes; every integer is a valid code."""
        if codes.dtype != torch.float8_e4m3fn:
            return
        raw = codes.view(torch.uint8).reshape(-1)
        if any(int((some & 0x7F).amax()) == 0x7F for some in raw.split(_CACHED)):
            nan = int(((raw & 0x7F) == 0x7F).sum())
            raise CheckpointError(
                f"{self._file_of[name]}: {name!r} holds {nan} value(s) that are not finite (NaN): the file is damaged, "
                "get it again"
            )

    def _check_finite(self, name: str, loaded: torch.Tensor) -> None:
        """Refuses NaN and infinity: one NaN in a norm or a gate makes finite but wrong outputs everywhere."""
        # The sum reads the rows once. Only if it is not finite (it may overflow), each value is checked.
        if math.isfinite(loaded.sum().item()) or bool(loaded.isfinite().all()):
            return
        count = int((~loaded.isfinite()).sum())
        beyond = "values beyond the range of float16, or " if loaded.dtype == torch.float16 else ""
        raise CheckpointError(
            f"{self._file_of[name]}: {name!r} holds {beyond}{count} value(s) that are not finite in {loaded.dtype} "
            "(NaN or infinity): get a damaged file again, or choose dtype='float32' for large values"
        )

    def _read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        """A part as stored; the next one takes its memory."""
        dtype = self._dtype(name, self._stored(name))
        count = math.prod(size) * dtype.itemsize
        if self._buffer.numel() < count:
            self._buffer = torch.empty(count, dtype=torch.uint8)
        part = self._buffer[:count].view(dtype).view(size)
        self._open[self._file_of[name]].read(name, part, start)
        self.bytes_read += count
        if self._digests is not None:
            self._digests.add(Part(name, start, size), part)
        return part

    def _check_block_scales(self, source: Source) -> None:
        """Checks that an FP8 weight has block scales of the right shape."""
        path = self._file_of[source.name]
        if self.block_size is None:
            raise CheckpointError(
                f"{path}: {source.name!r} is float8_e4m3fn, but config.json has no quantization_config with a "
                "weight_block_size; add it, or dequantise the checkpoint with dsa-engine convert"
            )
        if len(source.shape) != 2:
            raise CheckpointError(
                f"{path}: {source.name!r} is float8_e4m3fn but {len(source.shape)}-D; only matrices may be"
            )
        name = source.name + SCALE_SUFFIX
        if name not in self._file_of:
            raise CheckpointError(
                f"{path}: {source.name!r} is float8_e4m3fn, but {self.folder} lacks its scales {name!r}"
            )
        stored = self._stored(name)
        expected = tuple(cdiv(size, block) for size, block in zip(source.shape, self.block_size, strict=True))
        why = f"one scale per block of {list(self.block_size)} of {list(source.shape)}"
        self._check_shape(name, stored, expected, f" ({why})")
        if self._dtype(name, stored) == torch.float8_e4m3fn:
            raise CheckpointError(f"{self._file_of[name]}: {name!r} has dtype float8_e4m3fn; scales must be float32")

    def _stored(self, name: str) -> StoredTensor:
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}, which config.json implies (it has {len(self._file_of)} tensors)"
            )
        if path not in self._open:
            self._open[path] = ShardFile(path)
        stored = self._open[path].tensors.get(name)
        if stored is None:
            raise CheckpointError(f"{path} does not hold {name!r}: the index and the file disagree")
        return stored

    def _check_shape(self, name: str, stored: StoredTensor, expected: tuple[int, ...], why: str = "") -> None:
        if stored.shape != tuple(expected):
            shapes = f"has shape {list(stored.shape)}, expected {list(expected)}{why}"
            raise CheckpointError(f"{self._file_of[name]}: {name!r} {shapes}")

    def _dtype(self, name: str, stored: StoredTensor) -> torch.dtype:
        if stored.dtype not in STORED_DTYPES:
            raise CheckpointError(
                f"{self._file_of[name]}: {name!r} has the unsupported dtype {stored.dtype}; "
                f"supported are {', '.join(STORED_DTYPES)}"
            )
        return STORED_DTYPES[stored.dtype]
