"""The forms of MLA: the same outputs, the published counts, and nothing timed that is not equal."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from compare_mla import count
from mla_forms import FORMS, SIZES, MLAForm, MLASize, MLAWeights

SMALL = MLASize(hidden=48, heads=6, q_rank=40, kv_rank=32, nope=24, rope=8, value=20)
SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "compare_mla.py"


def naive(w: MLAWeights, q_latent: torch.Tensor, angle: torch.Tensor, latent: torch.Tensor, rotated: torch.Tensor):
    """DeepSeek-V2's equations in float64, head by head."""
    out = torch.zeros(q_latent.shape[0], w.size.hidden, dtype=torch.float64)
    for b in range(q_latent.shape[0]):
        for h in range(w.size.heads):
            turned = torch.empty(w.size.rope, dtype=torch.float64)
            q_rotated = w.qr[h].double() @ q_latent[b].double()
            for i in range(w.size.rope // 2):
                x, y = q_rotated[2 * i], q_rotated[2 * i + 1]
                c, s = angle[b, i].cos(), angle[b, i].sin()
                turned[2 * i], turned[2 * i + 1] = x * c - y * s, y * c + x * s
            keys = torch.cat((latent[b].double() @ w.uk[h].double().t(), rotated[b].double()), dim=-1)
            q = torch.cat((w.uq[h].double() @ q_latent[b].double(), turned))
            p = (keys @ q / (w.size.nope + w.size.rope) ** 0.5).softmax(0)
            out[b] += (p @ (latent[b].double() @ w.uv[h].double().t())) @ w.o[h].double()
    return out


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@pytest.mark.parametrize("context", [1, 64, 150])
def test_every_form_is_the_attention_of_the_paper(form: type[MLAForm], context: int) -> None:
    weights = MLAWeights.random(SMALL, torch.float32, "cpu", seed=3)
    generator = torch.Generator().manual_seed(context)
    latent, rotated, q = (
        torch.randn(shape, generator=generator)
        for shape in ((2, context, SMALL.kv_rank), (2, context, SMALL.rope), (2, SMALL.q_rank))
    )
    angle = torch.randn(2, SMALL.rope // 2, generator=generator)
    made = form(weights)
    out = made.decode(q, angle.cos(), angle.sin(), made.cache(latent, rotated))
    expected = naive(weights, q, angle.double(), latent, rotated)
    assert (out.double() - expected).norm() / expected.norm() < 1e-5


def test_the_published_counts_of_v2_come_out() -> None:
    """81.92 kB and 1.152 kB a token; 0.08, 33.64 and 0.28 MFLOP a cached token."""
    counts = {form.name: count(form, SIZES["v2"]) for form in FORMS}
    assert {n: c.cache_bytes for n, c in counts.items()} == {"CD": 81_920} | dict.fromkeys(
        ("CC", "A_CC", "A_CC_ME", "AM_CC_ME", "engine"), 1_152
    )
    flops = {name: round(c.flops / 1e6, 2) for name, c in counts.items()}
    assert flops == {"CD": 0.08, "CC": 33.64, "A_CC": 0.28, "A_CC_ME": 0.28, "AM_CC_ME": 0.28, "engine": 0.28}
    assert counts["AM_CC_ME"].weight_bytes > 3 * counts["A_CC"].weight_bytes


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(SIZES, "v2", SMALL)
    report = tmp_path / "mla.json"
    options = ["--size", "v2", "--context", "8,16", "--batch-size", "1,2", "--repeat", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["compare_mla.py", *options, "--json", str(report)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    result = json.loads(report.read_text())
    assert len(result["results"]) == 4 * len(FORMS) and set(result["counted"]) == {form.name for form in FORMS}
    assert capsys.readouterr().out.count("Measured, batch") == 4
