"""The values that a plan may choose, and the axes of a sweep: ``--help`` lists them, and torch is not imported here."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsa_engine.commands.planner.plan import Demand

WEIGHTS = ("bfloat16", "fp8", "int8", "int4-experts")
CACHES = ("bfloat16", "fp8")
DISPATCHES = ("all_gather", "all_to_all", "by_machine")
DISPATCH_DTYPES = ("bfloat16", "fp8")
DRAFTS = (0, 1, 2, 3)  # numbers of drafts that a plan may use

AXES: dict[str, Callable[[Demand], list[float]]] = {
    "devices": lambda demand: [
        demand.devices * factor for factor in (0.25, 0.5, 1, 2, 4) if demand.devices * factor >= 1
    ],
    "input-len": lambda demand: [demand.input_len * factor for factor in (0.0625, 0.125, 0.25, 0.5, 1, 2)],
    "requests": lambda demand: [(demand.requests or demand.devices) * factor for factor in (0.25, 0.5, 1, 2, 4)],
    "tpot": lambda demand: [(demand.tpot or 0.05) * factor for factor in (0.5, 0.75, 1, 1.5, 2, 3)],
    "ttft": lambda demand: [(demand.ttft or 2.0) * factor for factor in (0.5, 1, 2, 4, 8)],
}
