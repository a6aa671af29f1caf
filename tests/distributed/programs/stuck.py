"""Ranks that wait where no Python exception can arise, one of which fails: stuck.py FOLDER, without torchrun.

Rank 1 holds Python's lock while it waits. Rank 2 does not, is writing a file, and acts as if it were on another
machine.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path

import torch

from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.failure import peers, reporter, watch
from dsa_engine.system.output_files import whole_file

FOLDER = Path(sys.argv[1])
watch._POLL_S = 0.05
watch._OTHERS_S = 1.0

reporter.report_failures()
mesh = Mesh.create(ParallelConfig(timeout=600.0), "cpu")
waits = ctypes.PyDLL(None) if mesh.rank == 1 else ctypes.CDLL(None)
if mesh.rank == 2:
    peers_machine = peers.machine()
    peers.machine = reporter.machine = lambda: f"not-{peers_machine}"

waits.usleep(mesh.rank * 500_000)  # slow but healthy: longer than any wait of a failed run
mesh.world.all_gather(torch.ones(1))
print(f"rank {mesh.rank} is healthy", flush=True)
if mesh.rank == 0:
    while len(list(FOLDER.iterdir())) < 2:
        time.sleep(0.05)
    time.sleep(0.2)
    raise LookupError("no such expert")
if mesh.rank == 1:
    (FOLDER / "rank 1").touch()
    waits.pause()
with whole_file(FOLDER / "result.json") as file:
    file.write_text("half")
    waits.pause()
