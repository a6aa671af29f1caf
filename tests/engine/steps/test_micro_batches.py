"""Steps in two micro-batches: the cut, and what is computed while tokens travel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.context_buckets import Bucket
from dsa_engine.engine.steps.micro_batches import cut_chunks
from dsa_engine.engine.steps.static_rows import StaticRows
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.model.profile_stages import set_hook
from gloo_ranks import watch_transfers

DISPATCHES = ("all_to_all", "all_gather")


def chunk(number: int, start: int, length: int, ranks: range) -> Chunk:
    return Chunk(Request(number, [5] * 100, SamplingParams(max_tokens=1)), start, length, ranks, num_logits=1)


def test_each_group_is_cut_at_half_of_its_rows() -> None:
    pair, other = range(2), range(2, 4)
    chunks = [chunk(0, 4, 3, pair), chunk(1, 0, 8, pair), chunk(2, 10, 5, other), chunk(3, 0, 0, other)]
    first, second = cut_chunks(chunks, whole=False)
    assert [(c.request.id, c.start, c.length) for c in first] == [(0, 4, 3), (1, 0, 3), (2, 10, 3), (3, 0, 0)]
    assert [(c.request.id, c.start, c.length) for c in second] == [(1, 3, 5), (2, 13, 2)]
    assert {c.num_logits for c in first + second} == {0}, "logits are those of the whole step"


def test_drafts_of_a_request_stay_together() -> None:
    chunks = [chunk(number, 50, 3, range(1)) for number in range(3)]
    first, second = cut_chunks(chunks, whole=True)
    assert [c.request.id for c in first] == [0, 1] and [c.request.id for c in second] == [2]


def test_no_request_of_a_padded_step_is_cut(demo_random: LLM) -> None:
    model, cache = demo_random.engine.model, demo_random.engine.cache
    rows = StaticRows.of(Bucket(3, 3, cache.page_size, is_cut=True), 3, model, cache)
    batch = rows.batch(torch.zeros(3, 1).int(), torch.arange(9), torch.zeros(9).long())
    assert batch.micro_batches is not None
    assert [half().rows for half in batch.micro_batches.batches] == [3, 6]


class Stages(list[str]):
    """The stages that a pass has entered."""

    def enter(self, name: str) -> None:
        self.append(name)

    def leave(self) -> None:
        pass


@pytest.fixture
def entered() -> Iterator[Stages]:
    stages = Stages()
    set_hook(stages)
    yield stages
    set_hook(None)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("decodes", [False, True], ids=["prefill", "decode"])
def test_tokens_travel_under_the_other_micro_batch(
    entered: Stages, demo_cache: object, dispatch: str, decodes: bool
) -> None:
    """Between the start of each exchange and the wait for it, the other micro-batch computes: attention or experts.
    A layer's pages may leave when both have stored their rows."""
    options = {"enable_dbo": True}
    parallel = EmulatedConfig(emulate_world=2, moe_dispatch=dispatch, decode_dispatch=dispatch)  # type: ignore[arg-type]
    with LLM("demo-random", device="cpu", progress=False, parallel=parallel, max_model_len=512, **options) as llm:
        engine = llm.engine
        for number in range(4 if decodes else 1):
            engine.add([7 + number] * (20 if decodes else 300), SamplingParams(max_tokens=4, ignore_eos=True))
        while decodes and not all(request.output for request in engine.scheduler.running):
            engine.step()
        travels: dict[int, list[int]] = {}  # stages entered when each transfer begins, and when it is waited for
        watch_transfers(engine.mesh.ep, lambda _, kind, number: travels.setdefault(number, []).append(len(entered)))
        entered.clear()
        cache, stored = engine.cache, dict[int, Any]()
        cache.after_store.append(
            lambda layer: stored.setdefault(layer, [pool.on_device.clone() for pool in cache.page_map.layers[layer]])
        )
        engine.step()
        cache.after_store.clear()
        for layer, pools in stored.items():  # once both micro-batches have stored their rows
            assert all(
                torch.equal(now.on_device, pool) for now, pool in zip(cache.page_map.layers[layer], pools, strict=True)
            )
        assert len(stored) == engine.config.num_hidden_layers
        layers = sum(layer.moe is not None for layer in engine.model.layers)
    assert len(travels) == 2 * 2 * layers, "there and back, for each micro-batch and layer"
    computing = {"sparse flash attention", "MLA prolog", "MoE experts"}
    covered = [set(entered[begin:wait]) & computing for begin, wait in travels.values()]
    assert all(covered[:-1]), "nothing is left to compute beside the very last sums"
    assert {name for under in covered for name in under} >= {"MLA prolog", "MoE experts"}
