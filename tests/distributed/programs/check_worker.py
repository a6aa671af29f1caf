"""``dsa-engine check`` where ranks hold contexts together, twice: as the engine is, and where rank 1 selects one other
token in each row of layer 1: check_worker.py CASES.json FOLDER. A case has ``name``, ``folder``, ``parallel`` and
``options``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dsa_engine import ParallelConfig
from dsa_engine.commands.check.checks import findings
from dsa_engine.commands.check.command import text_ids
from dsa_engine.commands.doctor.checks import Finding
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.startup.start import start
from dsa_engine.model.context_shards import GroupRows
from dsa_engine.options import EngineOptions


def checked(engine: Engine, folder: str) -> list[dict[str, Any]]:
    ids = text_ids(None, engine.config.vocab_size, None, 100)
    results = findings(engine, Path(folder), ids, False, [1])
    return [asdict(one) for one in results if isinstance(one, Finding)]


def main() -> None:
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank, select, results = int(os.environ["RANK"]), GroupRows.select, dict[str, Any]()

    def selects_another(self: GroupRows, queries: Any, pool: torch.Tensor, *rest: Any) -> torch.Tensor:
        slots = select(self, queries, pool, *rest)
        if pool is faulty:  # a token that it has not selected comes in place of one that it has
            for row, of_row in enumerate(slots):
                pages = self.tables[self.segments.sequences[row]].long()
                visible = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
                others = visible[: self.segments.visible[row]]
                others = others[~torch.isin(others, of_row)]
                if len(others) and int(of_row[0]) >= 0:
                    of_row[0] = others[0]
        return slots

    for case in cases:
        options = EngineOptions(case["folder"], parallel=ParallelConfig(**case["parallel"]), **case["options"])
        engine, faulty = start(Path(case["folder"]), options)[0], None
        sound = checked(engine, case["folder"])
        if rank == 1:
            GroupRows.select = selects_another  # type: ignore[method-assign]
            faulty = engine.cache.index_keys[1]
        results[case["name"]] = sound, checked(engine, case["folder"])
        GroupRows.select = select  # type: ignore[method-assign]
    torch.save(results, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
