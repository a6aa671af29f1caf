"""The engine on one page on several ranks: ``page.py CASES FOLDER`` saves each rank's results. A case is the
checkpoint, what :func:`dsa.load` takes, and arguments of ``generate``, or tokens of which logits are wanted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from dsa_engine.reference import dsa


def run(case: dict[str, Any]) -> Any:
    engine = dsa.load(case["model"], torch.float32, **case["sizes"])
    return engine.logits(case["ids"]) if "ids" in case else [engine.generate(**calls) for calls in case["calls"]]


if __name__ == "__main__":
    results = [run(case) for case in json.loads(Path(sys.argv[1]).read_text())]
    torch.save(results, Path(sys.argv[2]) / f"rank{torch.distributed.get_rank()}.pt")
