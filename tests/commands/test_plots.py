"""What a plot of prefills shows, and what a report says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench import report
from dsa_engine.commands.bench.result import Result
from dsa_engine.measure.report import caption, run_report, write_json, write_so_far
from dsa_engine.model.profile_stages import STAGES


def prefill(input_len: int, seconds: float) -> Result:
    stages = dict.fromkeys((*STAGES, "host", "other"), seconds / 16) | {"LM head": 0.0}
    times = {"ttft": [seconds], "prefill": [seconds], "tpot": [seconds]}
    both = {"prefill": [stages], "decode": [stages]}
    return Result(input_len=input_len, ranks=1, peak_memory_bytes=[1], stages=both, **times)


def test_prefills_and_their_stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures: list[Any] = []
    save = report.save
    monkeypatch.setattr(report, "save", lambda figure, path: figures.append(figure) or save(figure, path))
    report.plot_times([prefill(4096, 2.0), prefill(8192, 6.0)], "ttft", str(tmp_path / "x.png"), "a title")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    times, bars = figures[0].axes
    assert times.figure.get_suptitle() == "a title" and list(times.lines[0].get_ydata()) == [2.0, 6.0]
    legend = [text.get_text() for text in bars.get_legend().get_texts()]
    assert legend == [*STAGES[:-1], "host", "other"], "a stage that takes no time has no entry"
    assert [bar.get_height() for bar in bars.patches] == [2.0 / 16, 6.0 / 16] * 15
    assert len({(bar.get_facecolor(), bar.get_hatch()) for bar in bars.patches}) == 15, (
        "each can be told from the others"
    )
    report.plot_times([prefill(4096, 2.0)], "tpot", str(tmp_path / "y.png"), "")
    assert figures[1].axes[0].get_ylabel() == "median TPOT, s" and len(figures[1].axes[1].patches) == 15
    assert "one run more" in bars.get_title(), "the stages are not those of the timed runs"


def test_a_line_says_where_it_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once, at the end."""
    caplog.set_level("INFO", "dsa_engine")
    for complete in (False, False, True):
        write_so_far(str(tmp_path / "a.json"), {}, [], complete=complete)
    report.plot_times([prefill(4096, 2.0)], "ttft", str(tmp_path / "x.png"), "")
    write_json("-", {})
    written = [f"the figures are in {tmp_path / 'a.json'}", f"the plot is in {tmp_path / 'x.png'}"]
    assert [record.getMessage() for record in caplog.records] == written


def test_a_report_says_what_a_comparison_needs(tmp_path: Path) -> None:
    llm = LLM("demo-random", device="cpu", max_model_len=512, seed=3)
    write_json(tmp_path / "a.json", run_report(llm.engine, {"seed": 3}, 1))
    about = json.loads((tmp_path / "a.json").read_text())
    assert about["options"] == {"seed": 3}
    assert about["options_in_force"]["page_size"] == 64 and about["options_in_force"]["seed"] == 3
    assert about["options_in_force"]["parallel"]["tp_size"] == 1
    assert about["model"]["num_hidden_layers"] == llm.engine.config.num_hidden_layers
    assert about["model"]["index_topk"] == 256
    assert about["date"].startswith("20") and about["date"].endswith("+00:00")
    above = caption(about, "emulated")
    for part in (about["model"]["name"], about["device"], about["dtype"], about["date"][:10], "1 thread", "emulated"):
        assert part in above
