"""Counts by version of Triton and by chip: kernels that compile, that spill registers, that do not compile."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def counts(kernels: Iterable[Mapping[str, Any]], missing: Iterable[str]) -> dict[str, Any]:
    """Counts of one version and chip, from the results of :func:`.inspect`.

    Returns:
        ``kernels``: number of compiled kernels; ``spill``: those that spill, the bytes per thread, and whether in the
        inner loop; ``not_compiled``: number of operations by reason.
    """
    kernels = list(kernels)
    spilling = [
        {
            "kernel": kernel["kernel"],
            "first_launched_by": f"{kernel['operation']}: {kernel['shape']}",
            "bytes": kernel["spilled"],
            "in_loop": kernel["bound"]["loop"] and kernel["bound"]["spills"] > 0,
        }
        for kernel in kernels
        if kernel["spilled"]
    ]
    reasons = Counter(re.sub(r"^.*?: (?=needs|[\w.]*(Error|Exception))", "", reason) for reason in missing)
    return {"kernels": len(kernels), "spill": spilling, "not_compiled": dict(reasons)}


def renewed(path: str, triton: str, counted: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The content of the file at ``path``, empty if there is none, with the counts of these chips and this version
    replaced.

    Raises:
        ValueError: the file is something else.
    """
    held: dict[str, Any] = {"measured_on": None, "note": "compiled without a GPU: nothing was run"}
    before: dict[str, Any] = {}
    if Path(path).exists():
        try:
            held = json.loads(Path(path).read_text(encoding="utf-8"))
            before = dict(held["triton"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is no file of counts; give another name, or remove it") from None
    versions = {**before, triton: {**before.get(triton, {}), **counted}}
    ordered = {version: dict(sorted(chips.items(), key=_number)) for version, chips in sorted(versions.items())}
    return {**held, "triton": ordered}


def _number(chip: tuple[str, Any]) -> int:
    return int(chip[0].removeprefix("sm_"))
