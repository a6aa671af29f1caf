"""Host work of one rank of a world, with a model that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from host_world import PAGE_SIZE, TOKEN, HostWorld


@pytest.mark.parametrize("world, requests, cp_size", [(1, 3, None), (6, 4, None), (8, 3, 4)])
def test_every_rank_owns_as_many_requests(demo_cache: Path, world: int, requests: int, cp_size: int | None) -> None:
    with HostWorld(world, requests, 2 * PAGE_SIZE, cp_size=cp_size) as host:
        host.fill()
        owners = [request.owner for request in host.running]
        assert sorted(owners) == sorted(list(range(world)) * requests)
        assert all(host.step() > 0 for _ in range(PAGE_SIZE + 2))
        (mine, *_) = [request for request in host.running if request.owner == 0]
        assert set(mine.output) == {TOKEN} and len(mine.output) >= PAGE_SIZE
        assert host.engine.launched_ahead >= PAGE_SIZE and host.engine.scheduler.preemptions == 0


def test_drafts_and_arrivals(demo_cache: Path) -> None:
    with HostWorld(4, 2, 64, drafts=2, enable_prefix_caching=True, max_prefill_share=0.5) as host:
        host.fill()
        for _ in range(8):
            host.arrive()
            host.step()
        assert host.calls(4, host.arrive) > 100
        assert all(host.step() > 0 for _ in range(4))
        assert host.engine.launched_ahead > 0


def test_before_launch(demo_cache: Path) -> None:
    with HostWorld(4, 0, 0, pages=80, max_num_batched_tokens=1024) as host:
        assert 0 < host.before_launch(4096) < 10
        with pytest.raises(ValueError, match="max_num_batched_tokens"):
            host.before_launch(4097)
