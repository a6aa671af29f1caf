"""Checks after loading that all ranks have read the same checkpoint.

Parts that several ranks have read (all but the experts, as a rule) are compared by their digests. Of a part that one
rank has read, the next rank reads the first elements from its own files and compares those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch

from dsa_engine.checkpoint import CheckpointReader
from dsa_engine.checkpoint.part_digests import START_ELEMENTS, Part, PartDigests, digest
from dsa_engine.errors import CheckpointError
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.group import Group

logger = logging.getLogger(__name__)

_NAMED = 3  # tensors in an error
# A row of the exchanged table: name (a number), start and size (0 in the second dimension of a vector), two digests.
Row = tuple[int, int, int, int, int, int, int]


@dataclass(frozen=True)
class _Difference:
    """A tensor that ranks have read differently; ``ranks`` with the same digest are together."""

    name: int
    ranks: tuple[tuple[int, ...], ...]


def compare_weights(mesh: Mesh, folder: Path, digests: PartDigests, load_seconds: float) -> None:
    """Compares what the ranks have read; all of them call it after loading.

    Args:
        folder: this rank's checkpoint.
        digests: of the parts that this rank has read.
        load_seconds: duration of loading, in which ``digests`` were made; for the log.

    Raises:
        CheckpointError: the checkpoints differ; raised on all ranks, and names tensors and ranks.
    """
    begun, group = time.perf_counter(), mesh.host
    with CheckpointReader(folder) as reader:
        names = {_number(name): name for name in reader.names()}
        tables = _exchange(group, [_row(part, *both) for part, both in digests.of.items()])
        differences, alone = _compare(tables)
        of_rank_before = set(tables[group.index - 1]).intersection(alone)
        mine = [row for row in of_rank_before if row[0] in names]
        wrong = [row for row in mine if digest(reader.read_start(_part(row, names), START_ELEMENTS)) != row[6]]
    for other, rows in enumerate(_exchange(group, wrong)):
        differences += [_Difference(row[0], (((other - 1) % group.size,), (other,))) for row in rows]
    if differences:
        raise CheckpointError(_text(mesh, differences, names))
    if mesh.is_leader:
        logger.info(
            "all ranks have read the same weights, digest %s: %.1f%% of loading, at %.1f GB/s, and %.1f s after it",
            _combined(tables),
            100 * digests.seconds / max(load_seconds, 1e-9),
            digests.bytes / max(digests.seconds, 1e-9) / 1e9,
            time.perf_counter() - begun,
        )


def _compare(tables: Sequence[Sequence[Row]]) -> tuple[list[_Difference], list[Row]]:
    """The differences between parts that several ranks have read, one for each tensor, and the parts of one rank."""
    readers: dict[tuple[int, ...], dict[Row, list[int]]] = {}
    for rank, rows in enumerate(tables):
        for row in rows:
            readers.setdefault(row[:5], {}).setdefault(row, []).append(rank)
    differences = {
        part[0]: _Difference(part[0], tuple(tuple(ranks) for ranks in same.values()))
        for part, same in readers.items()
        if len(same) > 1
    }
    alone = [row for same in readers.values() for row, ranks in same.items() if len(same) == len(ranks) == 1]
    return list(differences.values()), alone


def _text(mesh: Mesh, differences: Sequence[_Difference], names: dict[int, str]) -> str:
    """The error: how many tensors differ, the first of them, and between which ranks."""
    by_tensor = {one.name: one for one in reversed(differences)}
    first = [by_tensor[number] for number in list(reversed(by_tensor))[:_NAMED]]
    ranks = mesh.global_ranks
    sentences = [
        f"{names.get(one.name, 'a tensor that this rank lacks')} between rank "
        + " and rank ".join(", ".join(str(ranks[index]) for index in same) for same in one.ranks)
        for one in first
    ]
    more = ", …" if len(by_tensor) > _NAMED else ""
    return (
        f"the ranks have read different checkpoints: {len(by_tensor)} tensor(s) differ, {'; '.join(sentences)}{more}; "
        "give all machines the same files"
    )


def _combined(tables: Sequence[Sequence[Row]]) -> str:
    """A digest of all that was read; it is independent of how experts were divided over ranks."""
    parts = {row for rows in tables for row in rows}
    total = sum(int.from_bytes(blake2b(repr(row).encode(), digest_size=8).digest(), "little") for row in parts)
    return f"{total % (1 << 64):016x}"


def _exchange(group: Group, rows: Sequence[Row]) -> list[list[Row]]:
    """Every rank's rows, in order of rank."""
    counts = group.all_gather(torch.tensor([len(rows)])).tolist()
    if not any(counts):
        return [[] for _ in counts]
    table = torch.zeros(max(counts), 7, dtype=torch.int64)
    if rows:
        table[: len(rows)] = torch.tensor(rows)
    every = group.all_gather(table).view(group.size, -1, 7)
    return [[(*row,) for row in one[:count].tolist()] for one, count in zip(every, counts, strict=True)]


def _row(part: Part, whole: int, start: int) -> Row:
    vector = len(part.size) == 1
    return (
        _number(part.name),
        part.start[0],
        0 if vector else part.start[1],
        part.size[0],
        0 if vector else part.size[1],
        whole,
        start,
    )


def _part(row: Row, names: dict[int, str]) -> Part:
    name, row_start, column, rows, columns, _, _ = row
    return Part(names[name], (row_start, column)[: 2 if columns else 1], (rows, columns)[: 2 if columns else 1])


def _number(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
