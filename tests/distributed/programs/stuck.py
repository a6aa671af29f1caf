"""Ranks that wait where no Python exception can arise, one of which fails: stuck.py FOLDER, without torchrun."""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import torch

from dsa_engine.parallel import Mesh, ParallelConfig

FOLDER = Path(sys.argv[1])
mesh = Mesh.create(ParallelConfig(timeout=600.0), "cpu")
time.sleep(mesh.rank * 0.5)  # slow but healthy
mesh.world.all_gather(torch.ones(1))
print(f"rank {mesh.rank} is healthy", flush=True)
if mesh.rank == 0:
    while len(list(FOLDER.iterdir())) < 2:
        time.sleep(0.05)
    raise LookupError("no such expert")
(FOLDER / f"rank {mesh.rank} waits").touch()
ctypes.CDLL(None).pause()
