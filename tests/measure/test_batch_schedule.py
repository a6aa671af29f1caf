"""What lies under what, with one batch and with two."""

from __future__ import annotations

import pytest

from dsa_engine.measure.costs.batch_schedule import Exchange, LayerTimes, Legs, schedule
from dsa_engine.parallel.links import Transfer


def times(attention: float, dispatch: float, shared: float, experts: float, combine: float) -> LayerTimes:
    """A layer with exchanges of one transfer, all of it bytes between machines."""
    there, back = (Legs(everyone=Transfer(between=(0.0, seconds))) for seconds in (dispatch, combine))
    return LayerTimes(attention, Exchange(there=there, back=back), shared, experts)


def test_one_batch_hides_the_shared_expert_only() -> None:
    waits = schedule([[times(attention=5, dispatch=3, shared=1, experts=2, combine=4)] * 3], 0.0)
    assert (waits.computed, waits.dispatch, waits.combine) == (24, 6, 12) and waits.seconds == 42
    assert (waits.dispatched, waits.combined) == (9, 12)
    assert schedule([[LayerTimes(7)] * 2], 0.5).seconds == 14


def test_two_batches_hide_each_other() -> None:
    waits = schedule([[times(attention=5, dispatch=3, shared=1, experts=4, combine=4)] * 3] * 2, 0.0)
    # All but the last combine travels under the other batch.
    assert (waits.computed, waits.dispatch, waits.combine) == (60, 0, 4)
    long = times(attention=5, dispatch=30, shared=1, experts=4, combine=30)
    assert schedule([[long] * 9] * 2, 0.0).seconds > 9 * 120, "the links carry one after the other"


def test_computation_beside_a_collective_is_slower() -> None:
    waits = schedule([[times(attention=4, dispatch=2, shared=8, experts=4, combine=0)]], 0.5)
    assert waits.slowed == 1 and waits.dispatch == 0, "half of the device for 2 seconds"
    assert schedule([[times(attention=4, dispatch=2, shared=0.5, experts=4, combine=0)]], 0.5).slowed == 0.5


def test_nothing_lies_beside_counts() -> None:
    """The second batch's counts travel beside the first one's tokens, and are waited for at once."""
    layer = times(attention=5, dispatch=7, shared=1, experts=4, combine=0)
    counts = Legs(rail=Transfer(between=(1.0, 0.0)), machine=Transfer(inside=(1.0, 0.0)))
    counted = layer._replace(exchange=layer.exchange._replace(counts=counts))
    before, after = (schedule([[one]] * 2, 0.0) for one in (layer, counted))
    # Without counts, tokens travel from 5 to 12 and to 19, and experts run from 12 to 16. With counts, the device waits
    # from 5 to 7 and from 13 to 15, tokens travel from 7 to 14 and from 15 to 22, and experts run from 16 to 20.
    assert (before.dispatch, before.dispatched) == (3, 14)
    assert (after.dispatch, after.dispatched) == (2 + 2 + 2, 14 + 4)


def test_the_second_level_follows_the_first_beside_the_other_batch() -> None:
    """Tokens change from rail to machine while the other batch computes, and links of different kinds work at once."""
    two = Legs(rail=Transfer(between=(0.0, 3.0)), machine=Transfer(inside=(0.0, 2.0)))
    layer = LayerTimes(5.0, Exchange(there=two, back=two), 0.0, 6.0)
    waits = schedule([[layer] * 3] * 2, 0.0)
    # Only the last way back is not under the other batch: 2 seconds inside, 3 between.
    assert (waits.computed, waits.dispatch, waits.combine) == (66, 0, 5)


def test_more_layers_take_as_long_as_the_last() -> None:
    half = times(attention=5, dispatch=3, shared=1, experts=1, combine=6)
    whole, few, fewer = (schedule([[half] * n] * 2, 0.15) for n in (58, 4, 3))
    assert few.extended(fewer, 54).seconds == pytest.approx(whole.seconds)
