"""``worker.py`` on CPUs where the stub of DeepEP is installed: deep_ep_worker.py CASES.json FOLDER.

Each result also has ``calls``, the stub's functions and the number of their calls.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from worker import run_case

from dsa_engine.parallel.experts import deep_ep

sys.path.append(str(Path(__file__).parents[2] / "support"))


def main() -> None:
    from library_stubs import install

    patch = pytest.MonkeyPatch()
    calls = install(patch, "deep_ep")
    patch.setattr(deep_ep, "_DEVICE", "cpu")
    results: dict[str, Any] = {}
    for case in json.loads(Path(sys.argv[1]).read_text()):
        calls.clear()
        results[case["name"]] = run_case(case)
        results[case["name"]]["calls"] = dict(Counter(call.__name__ for call, *_ in calls))
    torch.save(results, Path(sys.argv[2]) / f"rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main()
