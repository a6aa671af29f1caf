"""The safetensors files of a checkpoint to be written: the tensors of each, and their offsets."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from dsa_engine.checkpoint.index import SINGLE_NAME
from dsa_engine.checkpoint.shard_file import STORED_DTYPES
from dsa_engine.checkpoint.tensor_spec import TensorSpec

DTYPE_NAMES = {dtype: name for name, dtype in STORED_DTYPES.items()}


@dataclass
class Shard:
    """One file and its tensors."""

    name: str
    specs: list[TensorSpec]

    def layout(self) -> tuple[bytes, dict[str, int], int]:
        """The file's header, the offset of every tensor from the start of the file, and the file's size."""
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets: dict[str, int] = {}
        position = 0
        # Wide dtypes first, so that every tensor starts at a multiple of its item size.
        for spec in sorted(self.specs, key=lambda spec: -spec.dtype.itemsize):
            header[spec.name] = {
                "dtype": DTYPE_NAMES[spec.dtype],
                "shape": list(spec.shape),
                "data_offsets": [position, position + spec.nbytes],
            }
            offsets[spec.name] = position
            position += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        packed = struct.pack("<Q", len(text)) + text
        return packed, {name: len(packed) + offset for name, offset in offsets.items()}, len(packed) + position


def plan_shards(tensors: Iterable[TensorSpec], limit: int) -> list[Shard]:
    """Divides tensors, in their order, over files of at most ``limit`` bytes; a larger tensor gets its own file.

    Raises:
        ValueError: no tensors, a name given twice, or a dtype that cannot be stored.
    """
    groups: list[list[TensorSpec]] = []
    seen: set[str] = set()
    filled = 0
    for spec in tensors:
        if spec.dtype not in DTYPE_NAMES:
            supported = ", ".join(map(str, DTYPE_NAMES))
            raise ValueError(f"{spec.name}: dtype {spec.dtype} cannot be written; supported are {supported}")
        if spec.name in seen:
            raise ValueError(f"{spec.name} is announced twice")
        seen.add(spec.name)
        if not groups or filled + spec.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    if not groups:
        raise ValueError("a checkpoint needs at least one tensor")
    if len(groups) == 1:
        return [Shard(SINGLE_NAME, groups[0])]
    return [Shard(f"model-{i:05}-of-{len(groups):05}.safetensors", group) for i, group in enumerate(groups, 1)]
