"""Runs cases side by side, each on a part of the ranks: parts_worker.py CASES.json FOLDER.

A case is one of ``worker.py`` with ``ranks``, the ranks of the run that compute it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from worker import run_case

from dsa_engine import ParallelConfig
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.disaggregation import create_mesh, page_groups


@dataclass(frozen=True)
class PartConfig(ParallelConfig):
    """A mesh of some ranks of the run."""

    ranks: tuple[int, ...] = ()

    def run_position(self) -> tuple[int, int]:
        return self.ranks.index(int(os.environ["RANK"])), len(self.ranks)


@create_mesh.register(PartConfig)
def _mesh_of_part(
    config: PartConfig, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None
) -> Mesh:
    return Mesh.create(config, device, config.ranks, same)


def exchange(mesh: Mesh) -> list[float]:
    """Rank 0 of the part sends a row, rank 1 sends twice that back; returns the row that this rank received."""
    row = torch.arange(3.0) + 1
    if mesh.rank == 0:
        mesh.world.send(row, 1)
        return mesh.world.recv(torch.empty(3), 1).tolist()
    into = mesh.world.recv(torch.empty(3), 0)
    mesh.world.send(2 * into, 0)
    return into.tolist()


def exchange_between_parts(rank: int, timeout: float) -> dict[int, int]:
    """Ranks 0 and 1 send their number to ranks 2 and 3; returns what each rank of the other part sent, or was sent."""
    sends, groups, numbers = rank < 2, page_groups(rank, (0, 1), (2, 3), torch.device("cpu"), timeout), {}
    for other in (2, 3) if sends else (0, 1):
        word = [(torch.tensor([rank]), other)]
        groups.device.exchange(*((word, []) if sends else ([], word)))
        numbers[other] = int(word[0][0])
    return numbers


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    (case,) = [case for case in cases if rank in case["ranks"]]
    config = PartConfig(**case["parallel"], ranks=tuple(case["ranks"]))
    result = run_case(case, config)
    mesh = create_mesh(config, "cpu")
    before = mesh.world.bytes_sent
    result["exchanged"] = exchange(mesh)
    result["exchanged_bytes"] = mesh.world.bytes_sent - before
    result["between_parts"] = exchange_between_parts(rank, config.timeout)
    result["mesh"] = (mesh.rank, mesh.world_size, mesh.nodes)
    torch.save(result, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
