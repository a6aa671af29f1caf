"""What all dispatches have in common, on ranks that are threads with Gloo between them."""

from __future__ import annotations

import sys

import pytest
import torch

from dsa_engine.parallel.experts.all_gather import AllGather
from dsa_engine.parallel.experts.all_to_all import AllToAll
from dsa_engine.parallel.experts.dispatch import Dispatcher, Routed, StepSizes
from dsa_engine.parallel.experts.placement import ExpertParallel, ExpertPlacement, contiguous
from dsa_engine.parallel.group import Group
from gloo_ranks import on_ranks, watch_transfers


@pytest.mark.parametrize(
    ("dispatcher", "there", "back"),
    [(AllToAll(), "all_to_all", "all_to_all"), (AllGather(), "all_gather", "reduce_scatter")],
)
@pytest.mark.parametrize("rounds", [1, 2])
def test_tokens_and_sums_travel_beside_other_work(dispatcher: Dispatcher, there: str, back: str, rounds: int) -> None:
    """Each exchange is begun by one call of a dispatch and waited for in a later one."""

    def work(group: Group) -> list[tuple[str, str, str]]:
        placement = ExpertPlacement(contiguous(2, 2), torch.device("cpu"))
        tokens, experts = torch.ones(8, 4), torch.arange(2, dtype=torch.int32).expand(8, 2)
        call, seen = "dispatch", list[tuple[str, str, str]]()
        watch_transfers(group, lambda what, kind, _: seen.append((what, kind, call)))
        max_pairs = sys.maxsize if rounds == 1 else 12
        routed = Routed(tokens, experts.contiguous(), torch.ones(8, 2))
        dispatch = dispatcher.start(ExpertParallel(group, placement), routed, StepSizes(8, max_pairs))
        call = "receive"
        assert dispatch.rounds == rounds
        for number in range(rounds):
            call = "receive"
            received = dispatch.receive(number)
            call = "send_back"
            dispatch.send_back(number, received.tokens)
        call = "combine"
        assert torch.equal(dispatch.combine(), torch.full((8, 4), 2.0))
        return seen

    expected = [("begin", there, "dispatch"), ("wait", there, "receive")]
    if there == back and rounds == 2:
        expected += [("begin", back, "send_back"), ("begin", there, "send_back")]
        expected += [("wait", back, "receive"), ("wait", there, "receive")]
    expected += [("begin", back, "send_back"), ("wait", back, "combine")]
    assert on_ranks(2, work) == [expected] * 2
