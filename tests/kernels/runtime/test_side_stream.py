"""Work on a side stream: what it is ordered after, and what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.kernels.runtime.transfer import SideStream
from fake_cuda import FakeDevice

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
on_fake_cuda = pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="a fake device is another one")


def test_on_a_cpu_what_follows_a_transfer_runs_when_it_is_waited_for() -> None:
    side, order = SideStream(CPU), list[str]()

    def note(what: str) -> Callable[..., str]:
        return lambda *given: order.append(what) or "".join((*given, what))

    now, later = side.run(note("a")), side.relay(note("b"), note("c"))
    assert order == ["a", "b"] and later() == "bc" and now() == "a" and order == ["a", "b", "c"]


@on_fake_cuda
class TestOnCuda:
    """The fake device refuses a use that overtakes another one."""

    def test_a_result_is_waited_for(self) -> None:
        with FakeDevice():
            join = SideStream(CUDA).run(lambda: torch.zeros(4, device=CUDA))
            assert join().add(1).shape == (4,)
        with FakeDevice():
            made: list[torch.Tensor] = []
            SideStream(CUDA).run(lambda: made.append(torch.zeros(4, device=CUDA)))
            with pytest.raises(RuntimeError, match="stream 0 has not waited for what stream 1 writes"):
                made[0].add(1)

    @pytest.mark.parametrize("held", [True, False])
    def test_inputs_are_held_until_the_wait(self, held: bool) -> None:
        with FakeDevice():
            side, rows = SideStream(CUDA), torch.zeros(4, device=CUDA)
            join = side.run(rows.clone, *([rows] if held else []))
            del rows
            if held:
                torch.zeros(4, device=CUDA)
                join()
                torch.zeros(4, device=CUDA)
            else:
                with pytest.raises(RuntimeError, match="stream 0 takes memory that .* stream 1 may still use"):
                    torch.zeros(4, device=CUDA)

    def test_a_wait_is_for_the_task_and_not_for_later_ones(self) -> None:
        with FakeDevice() as device:
            side = SideStream(CUDA)
            first = side.run(lambda: torch.zeros(4, device=CUDA))
            second = side.run(lambda: torch.zeros(4, device=CUDA))
            first()
            assert device.reached[0][1] == 1
            second()
            assert device.reached[0][1] == 2

    def test_work_from_a_mark_waits_for_nothing_later(self) -> None:
        with FakeDevice() as device:
            side, early = SideStream(CUDA), torch.zeros(4, device=CUDA)
            side.mark()
            late = torch.zeros(4, device=CUDA)
            join = side.run(early.clone, from_mark=True)
            assert device.launches[-1].before == {0: 1}
            join().add(1)
            with pytest.raises(RuntimeError, match="stream 1 has not waited for what stream 0 writes"):
                side.run(late.clone, from_mark=True)

    @pytest.mark.parametrize("marked", [True, False])
    def test_a_mark_after_the_last_use_frees_a_result(self, marked: bool) -> None:
        with FakeDevice():
            side = SideStream(CUDA)
            side.mark()
            result = side.run(lambda: torch.zeros(4, device=CUDA), from_mark=True)()
            result.add(1)
            del result
            if marked:
                side.mark()
                side.run(lambda: torch.zeros(4, device=CUDA), from_mark=True)
            else:
                with pytest.raises(RuntimeError, match="stream 1 takes memory that .* stream 0 may still use"):
                    side.run(lambda: torch.zeros(4, device=CUDA), from_mark=True)

    def test_memory_of_the_main_stream_is_used_after_what_that_has_done(self) -> None:
        with FakeDevice():
            torch.zeros(4, device=CUDA)  # freed at once
            early, late = torch.empty(4, device=CUDA), torch.empty(4, device=CUDA)
            with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(RuntimeError, match="stream 0 may still use"):
                early.zero_()
            SideStream(CUDA).run(late.zero_, late)()
