"""The prefetch of weights: which lines it asks for, and the instructions that are compiled."""

from __future__ import annotations

import pytest
import torch

from dsa_engine.kernels.linear.prefetch_weights import prefetch_weights, prefetched_lines
from dsa_engine.kernels.runtime.compile_only import compile_only
from dsa_engine.kernels.runtime.launch import INTERPRETED


def test_half_of_the_cache_is_asked_for() -> None:
    assert prefetched_lines([100, 128, 129], 4096) == (1, 1, 2)
    assert prefetched_lines([128 * 10, 128 * 10, 128], 128 * 30) == (10, 5), "the last tensor that fits is cut"
    assert prefetched_lines([], 4096) == prefetched_lines([128], 128) == ()


def test_nothing_is_done_on_a_cpu() -> None:
    assert prefetch_weights([]) == prefetch_weights([torch.ones(1000)]) == 0


@pytest.mark.skipif(INTERPRETED, reason="nothing can be compiled under TRITON_INTERPRET=1")
def test_the_instructions_stay() -> None:
    """Four lines a thread of each tensor, in a loop over its blocks; nothing is loaded, and nothing spills."""
    weights = [torch.empty(1536, 7168, dtype=torch.float8_e4m3fn), torch.empty(12, 56), torch.empty(30_000, 1024)]
    with compile_only(90) as launches:
        assert prefetch_weights(weights) == 25 << 20
    (launch,) = launches
    ptx, sass = launch.kernel.asm["ptx"], launch.sass()
    assert ptx.count("prefetch.global.L2 [") == sass.count("CCTL.E.PF2") == 4 * len(weights)
    assert "ld.global" not in ptx and "st.global" not in ptx
    resources = launch.resources(sass)
    assert launch.grid == (16, 1, 1) and resources.warps == 4
    assert resources.registers <= 32 and resources.spilled == resources.shared == 0
