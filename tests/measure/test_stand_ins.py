"""What stands in for other ranks is written down in one run and timed alone, in the way in which the step ran it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dsa_engine.measure.emulation.stand_ins import StandIns, stand_in

CPU = torch.device("cpu")


@dataclass
class Made:
    times: int = 0

    def __call__(self) -> int:
        self.times += 1
        return self.times


def test_every_call_is_run_again_as_often_as_it_was_made() -> None:
    noted, first, second = StandIns(), Made(), Made()
    with noted.noting():
        assert [stand_in("layer", first), stand_in("layer", first), stand_in("head", second)] == [1, 2, 1]
    stand_in("layer", first)  # nobody notes
    before = (first.times, second.times)
    assert noted.seconds(CPU) > 0
    runs = second.times - before[1]
    assert runs > 1 and first.times - before[0] == 2 * runs


def test_passes_alike_have_the_same_work() -> None:
    def of(*names: str, in_graph: bool = False) -> StandIns:
        noted = StandIns(in_graph)
        with noted.noting():
            for name in names:
                stand_in(name, Made())
        return noted

    assert of("a", "b", "a").work == of("a", "a", "b").work
    assert len({one.work for one in (of("a"), of("a", "a"), of("b"), of("a", in_graph=True), of())}) == 5
