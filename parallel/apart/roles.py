"""A run in two parts: the first ranks prefill, the others decode. Each part is a mesh of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dsa_engine.parallel.agreement import compare
from dsa_engine.parallel.mesh import Mesh

if TYPE_CHECKING:
    from dsa_engine.parallel.config import ParallelConfig


def part_options(prefill: ParallelConfig, decode: ParallelConfig) -> ParallelConfig:
    """The options of the part that this rank belongs to, out of those of both.

    Raises:
        ValueError: there are not enough ranks, or a part cannot be divided as its options say.
    """
    rank, ranks_that_prefill, size = position(prefill)
    for part, config, ranks in (
        ("prefill", prefill, ranks_that_prefill),
        ("decode", decode, size - ranks_that_prefill),
    ):
        sizes = {"tp_size": config.tp_size} | ({"cp_size": config.cp_size or 1} if part == "prefill" else {})
        for name, wanted in sizes.items():
            if ranks % wanted:
                option = name if part == "prefill" or wanted == prefill.tp_size else f"decode_options: {name}"
                raise ValueError(
                    f"{option} {wanted} does not divide the {ranks} rank(s) that {part}; see prefill_ranks"
                )
    return prefill if rank < ranks_that_prefill else decode


def mesh_of_part(config: ParallelConfig, device: str, same: Callable[[], Mapping[str, str]] | None) -> Mesh:
    """The mesh of this rank's part of the run. The decode part has context-parallel groups of one rank, as it prefills
    nothing.

    Raises:
        ValueError: there are not enough ranks, the part cannot be divided as the options say, or see
            :meth:`Mesh.create`.
    """
    rank, prefill, size = position(config)
    members = range(prefill) if rank < prefill else range(prefill, size)
    own = config if rank < prefill else replace(config, cp_size=1)
    mesh = Mesh.create(own, device, members, same)
    mesh.run_ranks = list(range(size))
    if same is not None:
        compare(same(), mesh.run_ranks, rank, config.timeout)
    return mesh


def position(config: ParallelConfig) -> tuple[int, int, int]:
    """This rank, the number of ranks that prefill, and that of all.

    Raises:
        ValueError: there are not enough ranks.
    """
    rank, size = config.run_position()
    prefill = config.prefill_ranks
    assert prefill is not None
    if prefill >= size:
        raise ValueError(
            f"prefill_ranks {prefill} leaves no rank to decode: the run has {size} rank(s); start more with torchrun, "
            "or lower prefill_ranks"
        )
    return rank, prefill, size
