"""Bytes that all-gathers send over this machine's network: gather_bytes.py RESULTS.json, on two ranks a node."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.group import Group

ROWS, TIMES = 1 << 18, 4  # bytes of a rank, and number of gathers


def sent() -> int:
    """Bytes that have left through ``eth0`` so far."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counters,) = [line.partition(":")[2].split() for line in lines if line.strip().startswith("eth0:")]
    return int(counters[8])


mesh = Mesh.create(ParallelConfig(), "cpu")
ring = Group(mesh.cp.ranks, mesh.cp.index, mesh.cp.handle)
rows = torch.full((ROWS,), mesh.rank, dtype=torch.uint8)
parts, equal = [], []
for group in (ring, mesh.cp):
    group.all_gather(rows)  # makes the connections
    mesh.together(lambda: None, 60)
    before = sent()
    for _ in range(TIMES):
        gathered = group.all_gather_async(rows)()
    mesh.together(lambda: None, 60)
    parts.append((sent() - before) / (TIMES * ROWS))
    equal.append(torch.equal(gathered, torch.arange(mesh.world_size, dtype=torch.uint8).repeat_interleave(ROWS)))
if mesh.is_leader:
    Path(sys.argv[1]).write_text(json.dumps({"parts": parts, "equal": equal, "form": type(mesh.cp.two_level).__name__}))
