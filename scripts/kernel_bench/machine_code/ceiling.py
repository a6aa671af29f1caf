"""Which share of its ceiling a kernel can reach at best in a case: a bound from its machine code, not measured.

The ceiling is the case's matter, by the roofline: right of the ridge point, where the operations that a case has to do
take the tensor cores longer than its bytes take the memory, it is that of the tensor cores, else that of the memory.
The share is the time of that one over the time of the unit which the inner loop keeps busy longest.

Of the memory's time only as much counts as the case needs for the operations of one time round, since what else the
loop asks for is in a cache, or is asked for twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from machine_code.chip_rates import RATES


def upper_bound(bound: Mapping[str, Any], flops: float, needed: float, capability: int) -> dict[str, Any]:
    """Of a kernel in a case.

    Args:
        bound: what :func:`.loop_bound` counted.
        flops: that the case has to do.
        needed: bytes that it has to move.
        capability: as in ``sm_90``.

    Returns:
        ``ceiling``: "tensor" or "memory"; ``limit``: the unit that takes longest; ``share``: at most this one of the
        ceiling; None where the loop neither multiplies nor moves anything.
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
