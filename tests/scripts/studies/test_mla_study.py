"""The forms of MLA: the same outputs, the published counts, and nothing timed that is not equal."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from compare_mla import FORMS, count
from dsa_engine.reference.dsa import Weights
from random_layer import SIZES, Size

SMALL = Size(hidden=48, heads=6, q_rank=40, kv_rank=32, nope=24, rope=8, value=20)
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "compare_mla.py"


def naive(w: Weights, q_latent: torch.Tensor, angle: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor):
    """DeepSeek-V2's equations in float64, head by head."""
    size = SMALL
    uq, qr = w.q_b_proj.double().view(size.heads, -1, size.q_rank).split((size.nope, size.rope), dim=1)
    uk, uv = w.kv_b_proj.double().view(size.heads, -1, size.kv_rank).split((size.nope, size.value), dim=1)
    o = w.o_proj.double().t().view(size.heads, size.value, size.hidden)
    out = torch.zeros(q_latent.shape[0], size.hidden, dtype=torch.float64)
    for b in range(q_latent.shape[0]):
        for h in range(size.heads):
            turned = torch.empty(size.rope, dtype=torch.float64)
            q_rotated = qr[h] @ q_latent[b].double()
            for i in range(size.rope // 2):
                x, y = q_rotated[2 * i], q_rotated[2 * i + 1]
                c, s = angle[b, i].cos(), angle[b, i].sin()
                turned[2 * i], turned[2 * i + 1] = x * c - y * s, y * c + x * s
            keys = torch.cat((latent[b].double() @ uk[h].t(), rotated[b].double()), dim=-1)
            q = torch.cat((uq[h] @ q_latent[b].double(), turned))
            p = (keys @ q / (size.nope + size.rope) ** 0.5).softmax(0)
            out[b] += (p @ (latent[b].double() @ uv[h].t())) @ o[h]
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("context", [1, 64, 150])
def test_every_form_is_the_attention_of_the_paper(form: str, context: int) -> None:
    weights = SMALL.weights(torch.float32, "cpu", seed=3)
    generator = torch.Generator().manual_seed(context)
    latent, rotated, q = (
        torch.randn(shape, generator=generator)
        for shape in ((2, context, SMALL.kv_rank), (2, context, SMALL.rope), (2, SMALL.q_rank))
    )
    angle = torch.randn(2, SMALL.rope // 2, generator=generator)
    made = FORMS[form](SMALL, weights)
    out = made.decode(q, (angle.cos(), angle.sin()), made.cache(latent, rotated))
    expected = naive(weights, q, angle.double(), latent, rotated)
    assert (out.double() - expected).norm() / expected.norm() < 1e-5


def test_the_published_counts_of_v2_come_out() -> None:
    """81.92 kB and 1.152 kB a token; 0.08, 33.64 and 0.28 MFLOP a cached token."""
    counts = {form: count(form, SIZES["v2"]) for form in FORMS}
    assert {n: c["cache_bytes"] for n, c in counts.items()} == {"CD": 81_920} | dict.fromkeys(
        ("CC", "A_CC", "A_CC_ME", "AM_CC_ME", "engine"), 1_152
    )
    flops = {name: round(c["flops"] / 1e6, 2) for name, c in counts.items()}
    assert flops == {"CD": 0.08, "CC": 33.64, "A_CC": 0.28, "A_CC_ME": 0.28, "AM_CC_ME": 0.28, "engine": 0.28}
    assert counts["AM_CC_ME"]["weight_bytes"] > 3 * counts["A_CC"]["weight_bytes"]


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SIZES, "v2", SMALL)
    report = tmp_path / "mla.json"
    options = ["--size", "v2", "--context", "8,16", "--batch-size", "1,2", "--repeat", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["compare_mla.py", *options, "--json", str(report)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(report.read_text())
    assert len(result["results"]) == 4 * len(FORMS) and set(result["counted"]) == {*FORMS}
    assert capsys.readouterr().out.count("engine") > 4
