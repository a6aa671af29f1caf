"""The report of a benchmark: a file with all results so far, tables of them, and a plot."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from dsa_engine.commands.arguments import reported
from dsa_engine.commands.bench.full_depth import FullDepth, first_layers
from dsa_engine.commands.bench.peak_fractions import PeakFractions, print_peak_fractions
from dsa_engine.commands.bench.result import Result
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import from_all_ranks
from dsa_engine.measure.emulation.arguments import HEADING, TITLE, described, to_json
from dsa_engine.measure.plots import load_pyplot, save
from dsa_engine.measure.report import caption, format_table, run_report, write_so_far
from dsa_engine.measure.stage_timer import mean_stages
from dsa_engine.system.sizes import format_bytes


class BenchReport:
    """The results so far. Every rank makes a report, as the ceilings of its device are measured; rank 0 writes it. Its
    table shows the times of ``metric``, "ttft" or "tpot"; the JSON holds both."""

    def __init__(self, llm: LLM, args: argparse.Namespace, metric: str):
        engine = llm.engine
        self._engine, self._path, self._plot, self._metric = engine, args.json, args.plot, metric
        self._depth = FullDepth.of(llm)
        self._fractions = PeakFractions(engine)
        load = from_all_ranks(engine, [engine.load_seconds, float(engine.bytes_read)])
        self._about = {
            **run_report(engine, reported(args), engine.mesh.processes.size),
            **to_json(engine),
            "load_seconds": [rank[0] for rank in load],
            "weight_bytes_read": [int(rank[1]) for rank in load],
        }
        self._results: list[Result] = []
        self._listed: list[dict[str, Any]] = []

    def add(self, result: Result, again: Callable[[], Result], last: bool) -> None:
        """``again`` measures the same, for the time with fewer layers, if times are to be scaled to more."""
        listed = result.to_json() | self._fractions.of(result)
        self._results.append(result)
        self._listed.append(listed)
        facts: dict[str, Any] = {"ceilings": self._fractions.ceilings.to_json()}
        facts["cuda_graph_memory_bytes"] = self._engine.graphs.memory_bytes if self._engine.graphs else 0
        if self._depth:
            with first_layers(self._engine, self._depth.fewer):
                listed |= self._depth.to_json(result, again())
        if self._engine.mesh.is_leader:
            write_so_far(self._path, self._about | facts, self._listed, complete=last)

    def show(self) -> None:
        if not self._engine.mesh.is_leader or not self._results:
            return
        if self._plot:
            plot_times(self._results, self._metric, self._plot, caption(self._about, described(self._engine, TITLE)))
        if above := described(self._engine, HEADING):
            print(above + "\n")
        unit = "input tokens/s" if self._metric == "ttft" else "output tokens/s"
        times = [f"{which} {self._metric.upper()} ms" for which in ("median", "p90", "p99")]
        header = ("input", "batch", "drafts", "output", *times, unit, "per device", "peak memory")
        print(format_table(header, [self._row(*pair) for pair in zip(self._results, self._listed, strict=True)]))
        for result in self._results if self._metric == "tpot" else ():
            if beyond := result.beyond_median:
                ms = statistics.median(beyond) * 1e3
                print(f"{result.size}: the steps of a run took {ms:,.2f} ms beyond the median step each")
        _print_speculation(self._results)
        for phase in ("prefill", "decode"):
            _print_stages(phase, self._results)
        print()
        print_peak_fractions([result.size for result in self._results], self._listed, self._fractions.ceilings)
        for result, json in zip(self._results, self._listed, strict=True):
            if self._depth and "scaled_to_full_depth" in json:
                print(self._depth.line(result.size, json["scaled_to_full_depth"], self._metric))

    def _row(self, result: Result, json: dict[str, Any]) -> tuple[Any, ...]:
        size = (f"{result.input_len:,}", result.batch_size, result.num_speculative_tokens, result.output_len)
        if f"median_{self._metric}_ms" not in json:
            return (*size, *["-"] * 6)  # the cache had no room for the whole batch to decode at once
        times = [json[f"{which}_{self._metric}_ms"] for which in ("median", "p90", "p99")]
        rate = "input_throughput" if self._metric == "ttft" else "output_throughput"
        return (*size, *times, json[rate], json[f"{rate}_per_device"], format_bytes(max(result.peak_memory_bytes)))


def _print_speculation(results: Sequence[Result]) -> None:
    rows = []
    for result in results:
        counts, assumed = result.speculation, result.assumed_acceptance
        if counts is not None and counts.num_drafts:
            rates = " ".join(f"{rate:.0%}" for rate in counts.acceptance_rates)
            by = "assumed" if assumed else "the model"
            rows.append((result.size, f"{counts.mean_acceptance_length:.2f}", rates, by))
    if rows:
        print("\n" + format_table(("drafts", "tokens a step", "accepted by position", "decided by"), rows))


def _print_stages(phase: str, results: Sequence[Result]) -> None:
    columns = {result.size: mean_stages(result.stages[phase]) for result in results if phase in result.stages}
    rows = []
    for name in next(iter(columns.values()), {}):
        fractions = [seconds[name] / sum(seconds.values()) for seconds in columns.values()]
        if any(fractions):
            rows.append((name, *(f"{fraction:.1%}" for fraction in fractions)))
    if rows:
        print("\n" + format_table((f"{phase} stage", *columns), rows))


def plot_times(results: Sequence[Result], metric: str, path: str, above: str) -> None:
    """Draws TTFT or TPOT against length, and the stages as stacked bars (mean over ranks), into a PNG."""
    phase = {"ttft": "prefill", "tpot": "decode"}[metric]
    results = [one for one in results if getattr(one, metric) and phase in one.stages]
    pyplot = load_pyplot()
    figure, (times, bars) = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    figure.suptitle(above, fontsize="medium")
    sizes = [one.size for one in results]
    times.plot(sizes, [statistics.median(getattr(one, metric)) for one in results], marker="o")
    times.set(xlabel="prompt tokens × requests", ylabel=f"median {metric.upper()}, s", ylim=(0, None))
    stages = [mean_stages(one.stages[phase]) for one in results]
    below = [0.0] * len(results)
    for number, name in enumerate(stages[0] if stages else ()):
        seconds = [one[name] for one in stages]
        if any(seconds):
            how = {"color": f"C{number % 8}", "hatch": ("", "///")[number // 8], "edgecolor": "white"}
            bars.bar(sizes, seconds, bottom=below, label=name, **how)
            below = [low + s for low, s in zip(below, seconds, strict=True)]
    about = "Stages, mean over ranks\n(one run more; to watch it takes time, so the sum may exceed the left)"
    bars.set(xlabel="prompt tokens × requests", ylabel="s", title=about)
    bars.legend(fontsize="x-small", loc="upper left", bbox_to_anchor=(1, 1))
    save(figure, path)
