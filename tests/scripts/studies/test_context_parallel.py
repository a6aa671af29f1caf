"""The forms of context parallelism in one process, against the paper's equations. On several ranks:
``tests/distributed/scripts/test_context_parallel.py``."""

from __future__ import annotations

import pytest
import torch

from context_parallel.forms import Contiguous, HeadTail, Ulysses
from context_parallel.layer import Division, Layer, Size
from context_parallel.ring import Ring
from dsa_engine.parallel.group import Group

TINY = Size(heads=3, kv_rank=32, nope=24, rope=8, value=20, index_heads=12, index_dim=16, topk=20)
CPU = torch.device("cpu")


def naive(layer: Layer, length: int) -> torch.Tensor:
    """Equations 1 and 2 of DeepSeek-V3.2-Exp in float64, token by token, head by head, keys and values expanded."""
    size, tokens = layer.size, layer.tokens(length)
    rows = tokens.cache_rows.double()
    latent, rotated, keys = rows.split((size.kv_rank, size.rope, size.index_dim), dim=1)
    out = torch.zeros(length, size.heads, size.value, dtype=torch.float64)
    for t in range(length):
        products = (tokens.index_q[t].double() @ keys[: t + 1].t()).relu()
        scores = tokens.index_weights[t].double() @ products
        chosen = scores.topk(min(size.topk, t + 1)).indices
        for h in range(size.heads):
            expanded = torch.cat((latent[chosen] @ layer.w_uk[h].double().t(), rotated[chosen]), dim=1)
            p = (expanded @ tokens.q[t, h].double() * (size.nope + size.rope) ** -0.5).softmax(0)
            out[t, h] = p @ (latent[chosen] @ layer.w_uv[h].double().t())
    return out


def test_the_layer_and_every_form_alone_are_the_paper_s() -> None:
    length = 150
    layer = Layer(TINY, torch.float32, CPU, seed=3)
    expected, tokens = naive(layer, length), layer.tokens(length)
    outputs = {"single process": layer.single_process(tokens, torch.arange(length))}
    for form in (HeadTail, Contiguous, Ulysses, Ring):
        division = Division(length, 1, form.layout)
        outputs[form.__name__] = form(layer, Group((0,), 0, None)).run(division, tokens)
    for name, out in outputs.items():
        assert (out.double() - expected).norm() / expected.norm() < 1e-5, name


@pytest.mark.parametrize(("length", "ranks"), [(1, 3), (7, 4), (64, 4), (101, 3), (200, 8)])
def test_work_is_what_counting_token_by_token_gives(length: int, ranks: int) -> None:
    for form in (HeadTail, Contiguous, Ulysses):
        division = Division(length, ranks, form.layout)
        assert sorted(torch.cat(division.positions).tolist()) == list(range(length))
        work = form.work(division, TINY)
        scored = [sum(2 * (p + 1) * 12 * 16 for p in part.tolist()) for part in division.positions]
        attended = [sum(2 * min(p + 1, 20) * 3 * (40 + 32) for p in part.tolist()) for part in division.positions]
        if form is Ulysses:
            attended = [sum(attended) / ranks] * ranks
        assert work == pytest.approx([a + b for a, b in zip(scored, attended, strict=True)])
