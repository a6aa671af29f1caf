"""Content of plots: read from the figure's axes, without looking at pixels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM
from dsa_engine.commands.bench.plots import plot_latency, plot_prefill
from dsa_engine.commands.bench.serving.datasets import RandomPrompts
from dsa_engine.commands.bench.serving.load import ServingLoad
from dsa_engine.commands.bench.serving.plot import plot_serving
from dsa_engine.commands.bench.serving.result import ServingResult
from dsa_engine.measure.plots import load_pyplot
from dsa_engine.measure.report import caption, run_report


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The axes of the figure that is drawn next."""
    pyplot = load_pyplot()
    figures: list[Any] = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    seen: list[Any] = []
    monkeypatch.setattr("dsa_engine.measure.plots.load_pyplot", lambda: pyplot)
    original = pyplot.subplots

    def subplots(*args: Any, **kwargs: Any) -> Any:
        figure, both = original(*args, **kwargs)
        seen.extend(both)
        return figure, both

    monkeypatch.setattr(pyplot, "subplots", subplots)
    yield seen
    monkeypatch.undo()
    for figure in figures:
        pyplot.close(figure)


def row(input_len: int, ms: float, batch_size: int = 1, metric: str = "tpot") -> dict[str, Any]:
    return {
        "input_len": input_len,
        "batch_size": batch_size,
        f"median_{metric}_ms": ms,
        f"p99_{metric}_ms": ms * 1.1,
        "stage_ms": {"decode": [{"router": ms / 2, "LM head": 0.0, "other": ms}]},
    }


def labels(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_a_line_has_ticks_at_the_measured_lengths(axes: list[Any], tmp_path: Path) -> None:
    rows = [row(n, n / 100, batch) for n in (2048, 32768, 131072) for batch in (1, 8)]
    plot_latency(rows, "tpot", str(tmp_path / "x.png"), "a title")
    curves, bars = axes
    assert [tick.get_text() for tick in curves.get_xticklabels()] == ["2,048", "32,768", "131,072"]
    assert list(curves.get_xticks()) == [2048, 32768, 131072]
    assert labels(curves) == [f"batch {b}, {what}" for b in (1, 8) for what in ("median", "99th percentile")]
    assert curves.get_ylabel() == "TPOT, ms"
    assert labels(bars) == ["router", "other"], "a stage that takes no time has no entry"
    assert "may exceed" in bars.get_title()
    assert curves.figure.get_suptitle() == "a title"


def test_one_length_is_a_group_of_bars(axes: list[Any], tmp_path: Path) -> None:
    plot_latency([row(2048, 10, 1), row(2048, 12, 8)], "tpot", str(tmp_path / "x.png"))
    curves, _ = axes
    assert not curves.get_lines() and [bar.get_height() for bar in curves.patches] == pytest.approx([10, 12, 11, 13.2])
    assert labels(curves) == ["median", "99th percentile"]
    assert [tick.get_text() for tick in curves.get_xticklabels()] == ["batch 1", "batch 8"]


def test_long_times_are_in_seconds(axes: list[Any], tmp_path: Path) -> None:
    stages = [{"router": 15_000.0, "other": 3_000.0}]
    rows = [row(n, n * 2.0, metric="ttft") | {"stage_ms": stages} for n in (4096, 8192)]
    plot_prefill(rows, str(tmp_path / "x.png"))
    curves, bars = axes
    assert (curves.get_ylabel(), bars.get_ylabel()) == ("TTFT, s", "s")
    assert "one run more" in bars.get_title(), "the stages are not those of the timed runs"
    assert curves.yaxis.get_major_formatter()(15_000.0, 0) == "15"


def test_measured_and_modelled_times_have_names_of_their_own(axes: list[Any], tmp_path: Path) -> None:
    times = {"computed": 100.0, "modelled_communication": 50.0, "not_overlapped": 150.0, "overlapped": 120.0}
    stages = {"prefill": [{"router": 1.0}]}
    rows = [{"input_len": n, "batch_size": 1, "ttft_ms": times, "stage_ms": stages} for n in (1024, 2048)]
    plot_latency(rows, "ttft", str(tmp_path / "x.png"))
    assert [text.split()[2] for text in labels(axes[0])] == ["computed", "with", "with"]
    assert sum("(modelled)" in text for text in labels(axes[0])) == 2


def test_a_batch_that_never_decoded_together_is_left_out(axes: list[Any], tmp_path: Path) -> None:
    plot_latency(
        [row(2048, 10) | {"stage_ms": {}}, {"input_len": 4096, "batch_size": 1, "stage_ms": {}}],
        "tpot",
        str(tmp_path / "x.png"),
    )
    assert [tick.get_text() for tick in axes[0].get_xticklabels()] == ["batch 1"]


def test_a_report_says_what_a_comparison_needs() -> None:
    llm = LLM("demo-random", device="cpu", max_model_len=512, seed=3)
    about = json.loads(json.dumps(run_report(llm, {"seed": 3}, 1)))
    assert about["options"] == {"seed": 3}
    assert about["options_in_force"]["page_size"] == 64 and about["options_in_force"]["seed"] == 3
    assert about["options_in_force"]["parallel"]["tp_size"] == 1
    assert about["model"]["num_hidden_layers"] == llm.engine.config.num_hidden_layers
    assert about["model"]["index_topk"] == 256
    assert about["date"].startswith("20") and about["date"].endswith("+00:00")
    above = caption(about, "emulated")
    for part in (about["model"]["name"], about["device"], about["dtype"], about["date"][:10], "1 thread", "emulated"):
        assert part in above


def test_times_to_the_first_token_by_hit_and_miss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def result(*requests: tuple[float, int]) -> ServingResult:
        load = ServingLoad(RandomPrompts(len(requests)))
        about = {"turn": 0, "output_len": 1, "error": None, "tpot": None, "itl": [], "e2el": 1.0}
        records = [
            about | {"conversation": number, "input_len": 9, "num_cached_tokens": cached, "ttft": ttft}
            for number, (ttft, cached) in enumerate(requests)
        ]
        return ServingResult.of(load, 1.0, 1, records, 1, {})

    figures: list[Any] = []
    monkeypatch.setattr("dsa_engine.commands.bench.serving.plot.save", lambda figure, *_: figures.append(figure))
    path = str(tmp_path / "x.png")
    plot_serving(result((0.4, 0), (0.1, 8), (0.2, 8)), result((0.4, 0), (0.5, 0), (0.6, 0)), path, "a title")
    plot_serving(result((0.4, 0)), None, path)
    both, plain = (figure.axes[0] for figure in figures)
    assert labels(both) == ["all (3)", "hits (2)", "misses (1)", "all, without hits (3)"]
    assert [list(line.get_xdata()) for line in both.lines[1:3]] == [[100.0, 100.0, 200.0], [400.0, 400.0]]
    assert list(both.lines[1].get_ydata()) == [0.0, 50.0, 100.0] and labels(plain) == ["all (1)"]
    for figure in figures:
        load_pyplot().close(figure)
