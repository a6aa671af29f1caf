"""What lies under what, with one batch and with two."""

from __future__ import annotations

import pytest

from dsa_engine.measure.costs.batch_schedule import LayerTimes, schedule


def test_one_batch_hides_the_shared_expert_only() -> None:
    layer = LayerTimes(attention=5, dispatch=3, shared=1, experts=2, combine=4)
    waits = schedule([[layer] * 3], 0.0)
    assert (waits.computed, waits.dispatch, waits.combine) == (24, 6, 12) and waits.seconds == 42
    assert (waits.dispatched, waits.combined) == (9, 12)
    dense = LayerTimes(7, 0, 0, 0, 0)
    assert schedule([[dense] * 2], 0.5).seconds == 14


def test_two_batches_hide_each_other() -> None:
    half = LayerTimes(attention=5, dispatch=3, shared=1, experts=4, combine=4)
    waits = schedule([[half] * 3] * 2, 0.0)
    # All but the last combine travels under the other batch.
    assert (waits.computed, waits.dispatch, waits.combine) == (60, 0, 4)
    long = half._replace(dispatch=30, combine=30)
    assert schedule([[long] * 9] * 2, 0.0).seconds > 9 * 120, "the links carry one after the other"


def test_computation_beside_a_collective_is_slower() -> None:
    layer = LayerTimes(attention=4, dispatch=2, shared=8, experts=4, combine=0)
    waits = schedule([[layer]], 0.5)
    assert waits.slowed == 1 and waits.dispatch == 0, "half of the device for 2 seconds"
    assert schedule([[layer._replace(shared=0.5)]], 0.5).slowed == 0.5


def test_more_layers_take_as_long_as_the_last() -> None:
    half = LayerTimes(attention=5, dispatch=3, shared=1, experts=1, combine=6)
    whole, few, fewer = (schedule([[half] * n] * 2, 0.15) for n in (58, 4, 3))
    assert few.extended(fewer, 54).seconds == pytest.approx(whole.seconds)
