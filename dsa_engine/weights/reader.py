"""Reads this rank's part of each tensor from safetensors files directly into the model's parameters.

The files are mapped, and only the pages of that part are read. FP8 blocks are expanded on the way into a parameter of
plain numbers; a parameter of codes takes the stored bytes. No copy is larger than ``CHUNK_ELEMENTS``, so that loading a
checkpoint needs no more memory than the model. A file must not change while it is read: if it becomes shorter, the
system may end the process (SIGBUS).
"""

from __future__ import annotations

import math
from collections.abc import KeysView
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dsa_engine.errors import CheckpointError
from dsa_engine.kernels.formats.fp8 import dequantize_blocks
from dsa_engine.kernels.formats.quantize import FP8
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.weights.index import locate_tensors, open_shard
from dsa_engine.weights.tensors import Source

SCALE_SUFFIX = "_scale_inv"
CHUNK_ELEMENTS = 1 << 24  # a temporary of at most 64 MiB in float32
_CACHED = 1 << 19  # bytes of a temporary that stays in a core's cache

# safetensors' names for the dtypes that a checkpoint may hold.
STORED_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": FP8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class CheckpointReader:
    """The tensors of a folder of safetensors files, which are opened on demand. ``block_size``: rows and columns that
    share one FP8 scale (``ModelConfig.weight_block_size``), or None."""

    def __init__(self, folder: str | Path, block_size: tuple[int, int] | None = None):
        self.folder = Path(folder)
        self.block_size = block_size
        self.bytes_read = 0  # bytes of weights and scales read so far
        self.names_read: set[str] = set()
        self._open: dict[Path, Any] = {}
        self._file_of = locate_tensors(self.folder)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._open.clear()

    def names(self) -> KeysView[str]:
        return self._file_of.keys()

    def describe(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The stored shape and dtype of a tensor; see :meth:`load` for errors."""
        stored = self._stored(name)
        dtype = STORED_DTYPES.get(stored.get_dtype())
        if dtype is None:
            supported = ", ".join(STORED_DTYPES)
            raise self._error(name, f"has the dtype {stored.get_dtype()}; supported are {supported}")
        return tuple(stored.get_shape()), dtype

    def load(self, source: Source) -> None:
        """Fills ``source.into``; :class:`CheckpointError` if the tensor or its file is missing, damaged, or not what
        the configuration says."""
        shape, dtype = self.describe(source.name)
        if source.without in self._file_of:
            raise self._error(
                source.without,
                "is stored, but quantization_config in config.json does not say so (weights.actorder: 'group'); get "
                "both files from the same place",
            )
        if shape != source.shape:
            raise self._error(source.name, f"has shape {list(shape)}, expected {list(source.shape)}")
        self._check_dtype(source, dtype)
        scaled = dtype == FP8 and not source.holds_codes
        if scaled:
            self._check_block_scales(source)
        if source.into.numel() == 0:
            return
        # Chunks end at block borders, so that no scale is read twice.
        rows_per_chunk = max(CHUNK_ELEMENTS // math.prod(source.into.shape[1:]), 1)
        block_rows = self.block_size[0] if scaled and self.block_size is not None else 1
        first, end = source.start[0], source.start[0] + source.into.shape[0]
        while first < end:
            last = min((first + rows_per_chunk) // block_rows * block_rows, end)
            if last <= first:  # a block has more rows than a chunk
                last = min(first // block_rows * block_rows + block_rows, end)
            into = source.into[first - source.start[0] : last - source.start[0]]
            start = (first, *source.start[1:])
            if scaled:
                self._expand(source.name, into, start)
            else:
                into.copy_(self._read(source.name, start, tuple(into.shape)))
            self._check_finite(source.name, into)
            first = last

    def _expand(self, name: str, into: torch.Tensor, start: tuple[int, ...]) -> None:
        """Fills ``into`` with the FP8 weights from ``start`` on times their scales. For a GPU, the FP8 bytes cross the
        bus and are expanded on the device."""
        assert self.block_size is not None
        blocks = [
            (offset // block, cdiv(offset + size, block) - offset // block)
            for offset, size, block in zip(start, into.shape, self.block_size, strict=True)
        ]
        scales = name + SCALE_SUFFIX
        scale_inv = self._read(scales, tuple(first for first, _ in blocks), tuple(count for _, count in blocks))
        self._check_finite(scales, scale_inv)
        codes = self._read(name, start, tuple(into.shape)).to(into.device)
        scale_inv = scale_inv.to(into.device, torch.float32)
        into.copy_(dequantize_blocks(codes, scale_inv, self.block_size, (start[0], start[1]), into.dtype))

    def _check_dtype(self, source: Source, stored: torch.dtype) -> None:
        """Checks that codes are stored where codes are expected, and floating point numbers elsewhere."""
        if source.holds_codes and stored != source.into.dtype:
            raise self._error(
                source.name,
                f"is {stored}, where config.json's quantization_config says {source.into.dtype}; name it there among "
                "the modules that are not quantised, or load with quantization='dequantize'",
            )
        if source.scale_of is not None and (stored == FP8 or not stored.is_floating_point):
            raise self._error(source.name, f"has dtype {stored}; scales must be float32")
        if not source.holds_codes and not stored.is_floating_point:
            raise self._error(source.name, f"is {stored}, where config.json implies plain numbers")

    def _check_block_scales(self, source: Source) -> None:
        if self.block_size is None or len(source.shape) != 2:
            raise self._error(
                source.name,
                "is float8_e4m3fn, which only matrices may be, with a weight_block_size in the quantization_config of "
                "config.json; add that, or dequantise the checkpoint with dsa-engine convert",
            )
        name = source.name + SCALE_SUFFIX
        if name not in self._file_of:
            raise self._error(source.name, f"is float8_e4m3fn, but {self.folder} lacks its scales {name!r}")
        shape, dtype = self.describe(name)
        expected = tuple(cdiv(size, block) for size, block in zip(source.shape, self.block_size, strict=True))
        if shape != expected or dtype == FP8 or not dtype.is_floating_point:
            raise self._error(
                name,
                f"is {dtype} {list(shape)}, expected float32 {list(expected)}: one scale per block of "
                f"{list(self.block_size)} of {list(source.shape)}",
            )

    def _check_finite(self, name: str, values: torch.Tensor) -> None:
        """Refuses NaN and infinity: one NaN in a norm or a gate makes finite but wrong outputs everywhere."""
        if values.dtype == FP8:
            raw = values.view(torch.uint8).reshape(-1)
            good = all(int((some & 0x7F).amax()) < 0x7F for some in raw.split(_CACHED))
        else:
            # The sum reads the rows once. Only if it is not finite (it may overflow), each value is checked.
            plain = values.is_floating_point()
            good = not plain or math.isfinite(values.sum().item()) or bool(values.isfinite().all())
        if not good:
            raise self._error(
                name,
                f"holds values that are not finite in {values.dtype} (NaN, infinity, or beyond its range): get it "
                "again if it is damaged, or choose dtype='float32' for large values",
            )

    def _read(self, name: str, start: tuple[int, ...], size: tuple[int, ...]) -> torch.Tensor:
        part: torch.Tensor = self._stored(name)[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))]
        self.bytes_read += part.nbytes
        self.names_read.add(name)
        return part

    def _stored(self, name: str) -> Any:
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}, which config.json implies (it has {len(self._file_of)} tensors)"
            )
        if path not in self._open:
            self._open[path] = open_shard(path)
        try:
            return self._open[path].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path} does not hold {name!r}: the index and the file disagree") from error

    def _error(self, name: str, what: str) -> CheckpointError:
        return CheckpointError(f"{self._file_of[name]}: {name!r} {what}")
