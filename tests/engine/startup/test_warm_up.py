"""The steps that memory is counted with are the largest that the scheduler makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.engine.startup.warm_up import DummySteps, uneven_bytes
from dsa_engine.parallel.experts.layer_placements import ExpertDivision
from dsa_engine.parallel.group import Group


@pytest.mark.parametrize(
    ("tokens", "max_model_len", "max_num_seqs", "lengths"),
    [
        (8192, 5000, 64, [5000, 3192]),
        (8192, 4000, 64, [4000, 4000, 192]),
        (8192, 4000, 2, [4000, 4000]),
        (8192, 20_000, 64, [8192]),
    ],
)
def test_prefill_steps_are_full(tokens: int, max_model_len: int, max_num_seqs: int, lengths: list[int]) -> None:
    mesh: Any = SimpleNamespace(
        world_size=4, cp_size=2, dcp=Group((0,), 0, None), cp_ranks=lambda group: range(2 * group, 2 * group + 2)
    )
    sizes = {"page_size": 64, "max_num_batched_tokens": tokens // 2, "max_num_seqs": max_num_seqs}
    for chunks, *_ in DummySteps(mesh, SimpleNamespace(**sizes), max_model_len).prefills():  # type: ignore[arg-type]
        for group in range(2):
            assert [chunk.length for chunk in chunks if chunk.ranks == mesh.cp_ranks(group)] == lengths
        assert all(chunk.end <= max_model_len for chunk in chunks)


MOE: Any = SimpleNamespace(
    num_experts_per_tok=8, moe_intermediate_size=10, hidden_size=100, mlp_layer_types=("sparse",), batch_invariant=False
)


def four_ranks(nodes: tuple[int, ...] | None = None, **options: Any) -> Any:
    groups, group = nodes and SimpleNamespace(nodes=nodes), SimpleNamespace(size=4)
    config = SimpleNamespace(**{"decode_dispatch": "all_gather"} | options)
    mesh: Any = SimpleNamespace(
        world_size=4, config=config, node_groups=groups, ep=group, device=None,
        nodes=nodes or (0, 0, 0, 0), is_leader=False,
    )  # fmt: skip
    mesh.experts = ExpertDivision(mesh)
    return mesh


@pytest.mark.parametrize(("chunk", "pairs"), [(None, 0), (800, 0), (1000, 200), (10_000, 2400), (700, 300)])
def test_a_chunk_that_even_routing_does_not_fill(chunk: int | None, pairs: int) -> None:
    """100 tokens with 8 experts on each of 4 ranks: 800 pairs a rank under even routing, 3,200 if all choose one rank,
    and 400 in each of two rounds. The results of earlier rounds are sums of 100 tokens on 4 ranks."""
    mesh = four_ranks(moe_dispatch="all_to_all", moe_chunk_size=chunk)
    assert uneven_bytes(MOE, mesh, 100, torch.bfloat16) == 100 * 4 * 200 + pairs * (2 * 10 + 4 * 100) * 2


def test_what_deep_ep_brings_at_once_is_counted() -> None:
    """All 400 tokens of 4 ranks may come to one, and their sums with them."""
    mesh = four_ranks(moe_dispatch="deep_ep", moe_chunk_size=None)
    assert uneven_bytes(MOE, mesh, 100, torch.bfloat16) == 2 * 400 * 200


def test_rows_along_the_rail_are_counted() -> None:
    """On two nodes of two ranks a token crosses once at the most, and a rail brings the tokens of two ranks."""
    there, back, by_node = 200 + 8 * 8 + 8, 200, {"moe_dispatch": "by_node", "moe_chunk_size": None}
    for nodes, method in ((None, "by_node"), ((0, 0, 1, 1), "all_to_all")):
        mesh = four_ranks(nodes, moe_dispatch=method, moe_chunk_size=None)
        assert uneven_bytes(MOE, mesh, 100, torch.bfloat16) == 100 * 4 * back
    mesh = four_ranks((0, 0, 1, 1), **by_node)
    assert uneven_bytes(MOE, mesh, 100, torch.bfloat16) == (200 + 200) * there + (200 + 800) * back
    mesh = four_ranks((0, 0, 1, 1), **by_node | {"moe_chunk_size": 50})
    further = (50 - 800 // 45) * (2 * 10 + 4 * 100) * 2  # pairs of a round, beyond those of 45 even ones
    assert uneven_bytes(MOE, mesh, 100, torch.bfloat16) == (200 + 100) * there + (200 + 50) * back + further


@pytest.mark.parametrize(("chunk", "pairs"), [(None, 0), (1000, 200), (700, 300)])
def test_pairs_that_travel_by_themselves(chunk: int | None, pairs: int) -> None:
    """With ``batch_invariant`` there are 800 rows of one expert, where there were 100 of 8."""
    moe: Any = SimpleNamespace(**vars(MOE) | {"batch_invariant": True})
    there, back, further = 208, 200, 2 * 10 * 2  # 52 words
    for method, words, rows in (("all_to_all", False, 800), ("all_gather", True, 800 * 4), ("all_gather", False, 0)):
        mesh = four_ranks(moe_dispatch=method, moe_chunk_size=chunk)
        each = further + (2 if method == "all_gather" else 4) * back
        assert uneven_bytes(moe, mesh, 100, torch.bfloat16, words) == rows * back + pairs * each
    mesh = four_ranks((0, 0, 1, 1), moe_dispatch="by_node", moe_chunk_size=chunk)
    sent, bound = 800, chunk or 800  # a row crosses once, as it has one expert
    crossing = (sent + min(2 * bound, 2 * 800)) * there + (sent + bound) * back
    assert uneven_bytes(moe, mesh, 100, torch.bfloat16) == crossing + pairs * (further + 4 * back)
