"""Checks after loading that all ranks have read the same checkpoint.

Parts that several ranks have read (all but the experts, as a rule) are compared by their digests. Of a part that one
rank has read, the next rank reads the first elements from its own files and compares those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

from dsa_engine.checkpoint import CheckpointReader
from dsa_engine.checkpoint.part_digests import START_ELEMENTS, Part, PartDigests, digest
from dsa_engine.errors import CheckpointError
from dsa_engine.parallel import Mesh

logger = logging.getLogger(__name__)

_NAMED = 3  # tensors in an error
Table = Mapping[Part, tuple[int, int]]  # see `PartDigests.of`


def compare_weights(mesh: Mesh, folder: Path, digests: PartDigests, load_seconds: float) -> None:
    """Compares what the ranks have read from their ``folder``; all of them call it after loading.

    Args:
        digests: of the parts that this rank has read.
        load_seconds: duration of loading, in which ``digests`` were made; for the log.

    Raises:
        CheckpointError: the checkpoints differ; raised on all ranks, and names tensors and ranks.
    """
    begun, group = time.perf_counter(), mesh.host
    tables = group.all_gather_object(digests.of)
    differences, alone = _compare(tables)
    with CheckpointReader(folder) as reader:
        names = set(reader.names())
        wrong = [
            part.name
            for part, (_, start) in tables[group.index - 1].items()
            if part in alone and part.name in names and digest(reader.read_start(part, START_ELEMENTS)) != start
        ]
    for other, tensors in enumerate(group.all_gather_object(wrong)):
        for name in tensors:
            differences.setdefault(name, [[(other - 1) % group.size], [other]])
    if differences:
        raise CheckpointError(_text(mesh, differences))
    if mesh.is_leader:
        logger.info(
            "all ranks have read the same weights, digest %s: %.1f%% of loading, at %.1f GB/s, and %.1f s after it",
            _combined(tables),
            100 * digests.seconds / max(load_seconds, 1e-9),
            digests.bytes / max(digests.seconds, 1e-9) / 1e9,
            time.perf_counter() - begun,
        )


def _compare(tables: Sequence[Table]) -> tuple[dict[str, list[list[int]]], set[Part]]:
    """The tensors that several ranks have read differently, each with the ranks that agree on it together, and the
    parts that one rank has read."""
    readers: dict[Part, dict[tuple[int, int], list[int]]] = {}
    for rank, table in enumerate(tables):
        for part, both in table.items():
            readers.setdefault(part, {}).setdefault(both, []).append(rank)
    differences: dict[str, list[list[int]]] = {}
    for part, same in readers.items():
        if len(same) > 1:
            differences.setdefault(part.name, list(same.values()))
    return differences, {part for part, same in readers.items() if sum(map(len, same.values())) == 1}


def _text(mesh: Mesh, differences: Mapping[str, Sequence[Sequence[int]]]) -> str:
    """The error: how many tensors differ, the first of them, and between which ranks."""
    ranks = mesh.global_ranks
    sentences = [
        f"{name} between rank " + " and rank ".join(", ".join(str(ranks[index]) for index in same) for same in between)
        for name, between in list(differences.items())[:_NAMED]
    ]
    more = ", …" if len(differences) > _NAMED else ""
    return (
        f"the ranks have read different checkpoints: {len(differences)} tensor(s) differ, "
        f"{'; '.join(sentences)}{more}; "
        "give all nodes the same files"
    )


def _combined(tables: Sequence[Table]) -> str:
    """A digest of all that was read; it is independent of how experts were divided over ranks."""
    parts = {item for table in tables for item in table.items()}
    total = sum(int.from_bytes(blake2b(repr(item).encode(), digest_size=8).digest(), "little") for item in parts)
    return f"{total % (1 << 64):016x}"
