"""The forms of context parallelism in one process, against the paper's equations. On several ranks:
``tests/distributed/scripts/test_context_parallel.py``."""

from __future__ import annotations

import pytest
import torch

from compare_context_parallel import FORMS, Contiguous, Divided, HeadTail, Ulysses
from dsa_engine.parallel.group import Group
from random_layer import Layer, Size
from study import WAYS

TINY = Size(heads=3, kv_rank=32, nope=24, rope=8, value=20, index_heads=12, index_dim=16, topk=20)
CPU = torch.device("cpu")


def naive(layer: Layer, length: int) -> torch.Tensor:
    """Equations 1 and 2 of DeepSeek-V3.2-Exp in float64, token by token, head by head, keys and values expanded."""
    size, (queries, cache_rows, index_q, index_weights) = layer.size, layer.tokens(length)
    latent, rotated, keys = cache_rows.double().split((size.kv_rank, size.rope, size.index_dim), dim=1)
    out = torch.zeros(length, size.heads, size.value, dtype=torch.float64)
    for t in range(length):
        products = (index_q[t].double() @ keys[: t + 1].t()).relu()
        scores = index_weights[t].double() @ products
        chosen = scores.topk(min(size.topk, t + 1)).indices
        for h in range(size.heads):
            expanded = torch.cat((latent[chosen] @ layer.w_uk[h].double().t(), rotated[chosen]), dim=1)
            p = (expanded @ queries[t, h].double() * (size.nope + size.rope) ** -0.5).softmax(0)
            out[t, h] = p @ (latent[chosen] @ layer.w_uv[h].double().t())
    return out


def test_the_layer_and_every_form_alone_are_the_paper_s() -> None:
    length = 150
    layer = Divided(TINY, torch.float32, CPU, seed=3)
    expected, tokens = naive(layer, length), layer.tokens(length)
    outputs = {name: form(layer, Group((0,), 0, None), length).run(tokens) for name, form in FORMS.items()}
    outputs |= {way: of(layer, tokens, layer.select(tokens)) for way, of in WAYS.items() if way.startswith("sparse")}
    for name, out in outputs.items():
        assert (out.double() - expected).norm() / expected.norm() < 1e-5, name


def test_dense_ways_are_the_paper_s_with_all_tokens_selected() -> None:
    layer = Layer(TINY._replace(topk=60), torch.float32, CPU, seed=3)
    expected, last = naive(layer, 60), layer.tokens(60)
    for way in ("dense, naive", "dense, absorbed"):
        out = WAYS[way](layer, (last[0][-7:], *last[1:]), last[2])  # of the last queries only, as in decode
        assert (out.double() - expected[-7:]).norm() / expected[-7:].norm() < 1e-5, way


@pytest.mark.parametrize(("length", "ranks"), [(1, 3), (7, 4), (64, 4), (101, 3), (200, 8)])
def test_work_is_what_counting_token_by_token_gives(length: int, ranks: int) -> None:
    layer = Divided(TINY._replace(heads=24), torch.float32, CPU)
    for kind in (HeadTail, Contiguous, Ulysses):
        form = kind(layer, Group(tuple(range(ranks)), 0, None), length)
        assert sorted(torch.cat(form.positions).tolist()) == list(range(length))
        scored = [sum(2 * (p + 1) * 12 * 16 for p in part.tolist()) for part in form.positions]
        attended = [sum(2 * min(p + 1, 20) * 24 * (40 + 32) for p in part.tolist()) for part in form.positions]
        if kind is Ulysses:
            attended = [sum(attended) / ranks] * ranks
        assert form.work() == pytest.approx([a + b for a, b in zip(scored, attended, strict=True)])


@pytest.mark.parametrize(("ranks", "expected"), [(2, 1.5), (4, 1.75), (8, 1.875)])
def test_contiguous_is_not_balanced(ranks: int, expected: float) -> None:
    form = Contiguous(Divided(TINY, torch.float32, CPU), Group(tuple(range(ranks)), 0, None), 8192)
    pairs = [int((positions + 1).sum()) for positions in form.positions]
    assert max(pairs) / (sum(pairs) / ranks) == pytest.approx(expected, abs=1e-3)
