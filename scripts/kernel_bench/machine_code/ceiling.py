"""Upper bound of the fraction of its ceiling that a kernel can reach in a case: from its machine code, not measured.

The ceiling follows from the case by the roofline: if its operations take the tensor cores longer than its bytes take
the memory, it is the tensor cores' rate, else the memory's. The fraction is the time of that unit over the time of the
unit that the inner loop keeps busy longest.

The memory's time counts only the bytes that the case needs for the operations of one iteration, since other loads of
the loop are in a cache or repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from machine_code.chip_rates import RATES


def upper_bound(bound: Mapping[str, Any], flops: float, needed: float, capability: int) -> dict[str, Any]:
    """The bound of a kernel in a case.

    Args:
        bound: counts of :func:`.loop_bound`.
        flops: operations of the case.
        needed: bytes that the case has to move.
        capability: such as 90 for ``sm_90``.

    Returns:
        ``ceiling``: "tensor" or "memory"; ``limit``: the unit that takes longest; ``share``: the bound of the
        fraction; None if the loop neither multiplies nor moves anything.
    """
    units = dict(bound["cycles"])
    tensor, memory = units["tensor"], units.pop("memory")
    ceiling = "memory"
    if bound["operations"] and flops:
        least = bound["operations"] * needed / flops / RATES[capability].memory
        memory = min(memory, least)
        ceiling = "tensor" if tensor > least else "memory"
    if ceiling == "memory":
        units["memory"] = memory
    limit = max(units, key=lambda unit: units[unit])
    fraction = units[ceiling] / units[limit] if units[ceiling] else None
    return {"ceiling": ceiling, "limit": limit, "share": None if fraction is None else round(fraction, 3)}
