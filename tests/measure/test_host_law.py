"""The law of host work: what a rank does for a step follows from what it owns, whatever the size of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host_world import PAGE_SIZE, HostWorld


def calls(world: int, **options: Any) -> float:
    """Python functions called in a decode step with 8 requests a rank; each fills a page within these steps."""
    with HostWorld(world, 8, PAGE_SIZE + 4, **options) as host:
        host.fill()
        for _ in range(4):
            host.step()
        return host.calls(PAGE_SIZE)


@pytest.mark.parametrize("options", [{}, {"drafts": 1}, {"enable_prefix_caching": True}], ids=str)
def test_calls_of_a_decode_step_do_not_grow_with_the_world(demo_cache: Path, options: dict[str, Any]) -> None:
    few, many = calls(2, **options), calls(64, **options)
    assert many < 1.2 * few, f"{many:.0f} Python functions are called in a step of 64 ranks, {few:.0f} of 2"


@pytest.mark.parametrize("relayed", [False, True], ids=["tasks", "relay"])
def test_a_further_stream_costs_no_python_function(demo_cache: Path, relayed: bool) -> None:
    """Rank 0 has the callers of all ranks: its loop gives them a step's tokens together."""
    calls = []
    for world in (2, 16):
        with HostWorld(world, 8, 20_000) as host:
            calls.append(host.streamed(16, relayed)[1])
    further = (calls[1] - calls[0]) / (8 * 14)
    assert further <= 1, f"{further:.1f} Python functions are called in a turn for a further stream"
