"""The division of a step over ranks: each token once, and what a rank knows of the others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_engine import SamplingParams
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.batch import gathered_slots, own_slots
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.model.forward_batch import BlockTables

PAGE = 4
# A chunk: the request's id, start, length, group, and where it is cut, as a part of its length.
PARTS = st.tuples(st.integers(0, 99), st.integers(0, 90), st.integers(0, 200), st.integers(0, 1), st.floats(0, 1))


@settings(deadline=None)
@given(parts=st.lists(PARTS, max_size=5), cp=st.integers(2, 5), cut=st.booleans())
def test_what_ranks_know_of_each_other(parts: list[tuple[int, int, int, int, float]], cp: int, cut: bool) -> None:
    config = replace(ModelConfig.from_pretrained(demo_folder()), index_topk=50)
    world, chunks, cuts, used = 2 * cp, [], {}, 0
    for number, start, length, group, at in parts:
        end = start + length
        pages = list(range(used, used := used + -(-end // PAGE)))
        request = Request(number, range(end), SamplingParams(max_tokens=1), pages=pages)
        chunks.append(Chunk(request, start, length, range(group * cp, (group + 1) * cp), int(length > 0)))
        if cut and 0 < int(at * length) < length:
            cuts[request] = start + int(at * length)
    steps = [StepPlan.of(chunks, rank, world, config, cuts=cuts) for rank in range(world)]
    halves = (
        [replace(c, length=cuts.get(c.request, c.end) - c.start, num_logits=0) for c in chunks],
        [replace(c, start=at, length=c.end - at, num_logits=0) for c in chunks if (at := cuts.get(c.request))],
    )
    for after, half in enumerate(halves):  # as if the chunks before or after the cuts were divided by themselves
        for rank, step in enumerate(steps):
            ours, alone = step.part(half, after=bool(after)), StepPlan.of(half, rank, world, config)
            assert ours.own == alone.own and ours.rows.tolist() == alone.rows.tolist()
            assert [ours.of_rank(other) for other in range(world)] == [alone.of_rank(other) for other in range(world)]
    plans = [step.own for step in steps]
    tokens = [
        (plan.chunks[s.sequence], position)
        for plan in plans
        for s in plan.segments
        for position in range(s.start, s.end)
    ]
    assert len(tokens) == len(set(tokens)) == sum(chunk.length for chunk in chunks)
    assert all(chunk.start <= position < chunk.end for chunk, position in tokens)
    tables = BlockTables(PAGE, torch.device("cpu"))
    for rank, step in enumerate(steps):
        assert list(step.rows) == [plan.rows for plan in plans]
        assert [step.of_rank(other) for other in range(world)] == plans
        ranks = range(rank // cp * cp, (rank // cp + 1) * cp)
        table_rows = tables.rows([chunk.request.pages for chunk in plans[rank].chunks])
        if not table_rows:
            continue
        group: Any = SimpleNamespace(ranks=tuple(ranks))
        longest = max(1, *(plans[other].rows for other in ranks))
        one_by_one = [own_slots(plans[other], tables, table_rows) for other in ranks]
        expected = torch.cat([F.pad(slots, (0, longest - len(slots)), value=-1) for slots in one_by_one])
        assert torch.equal(gathered_slots(step, group, tables, table_rows), expected)
