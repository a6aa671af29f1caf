"""TTFT and TPOT: ``scripts/measure_ttft.py``, ``scripts/measure_tpot.py`` and ``dsa-engine bench ttft|tpot``."""

from __future__ import annotations

import argparse
import json
from functools import cached_property
from itertools import product
from typing import Any

from dsa_engine.arguments import json_object, reported
from dsa_engine.commands.bench.full_depth import FullDepth
from dsa_engine.commands.bench.generation_benchmark import LatencyResult, check_latency, measure_latency
from dsa_engine.commands.bench.generation_tables import print_latencies, size_of
from dsa_engine.commands.bench.peak_fractions import PeakFractions, print_peak_fractions
from dsa_engine.commands.early import Early
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import num_processes
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.emulation.arguments import heading, measured_llm, to_json
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import run_report, write_so_far
from dsa_engine.measure.stage_timer import chrome_trace, mean_stages
from dsa_engine.measure.timed_generation import generate_batch
from dsa_engine.system.output_files import check_outputs


def run_ttft(args: argparse.Namespace) -> None:
    """:func:`run_latency` for the time to first token."""
    run_latency(args, "ttft")


def run_tpot(args: argparse.Namespace) -> None:
    """:func:`run_latency` for the time per output token."""
    run_latency(args, "tpot")


def run_latency(args: argparse.Namespace, metric: str) -> None:
    """Measures every length and batch size, and reports ``metric``: files first, then tables. The JSON has each result
    as soon as it is measured; after Ctrl-C the tables show the results so far.

    Args:
        args: the options of the metric (:mod:`.options`).
        metric: "ttft" or "tpot": which time the table shows; the JSON holds both.

    Raises:
        ValueError, OSError: an option or a file is not possible; then nothing has been measured.
    """
    _check(args, metric)
    counts = getattr(args, "num_speculative_tokens", None)
    if counts and max(counts):
        given = json_object(args.speculative_config, "--speculative-config")
        args.speculative_config = json.dumps(given | {"num_speculative_tokens": max(counts)})
    Early(args).check_lengths(max(args.input_len), args.output_len)
    llm = measured_llm(args)
    engine = llm.engine
    for input_len in args.input_len:  # check all before measuring any
        for batch_size in args.batch_size:
            check_latency(engine, input_len, args.output_len, batch_size, _fills_cache(args))
    cases = list(product(args.input_len, args.batch_size, counts or [engine.runner.num_drafts]))
    report = _Report(llm, args, metric)
    try:
        for number, (input_len, batch_size, num_drafts) in enumerate(cases, 1):
            report.add(_measure(llm, args, input_len, batch_size, num_drafts))
            report.write(complete=number == len(cases))
        if args.profile:
            _profile(engine, args)
    finally:
        report.show()


class _Report:
    """The results so far."""

    def __init__(self, llm: LLM, args: argparse.Namespace, metric: str):
        self._llm, self._args, self._metric = llm, args, metric
        self._engine = llm.engine
        self._depth = FullDepth.of(llm)
        self._fractions = PeakFractions(llm.engine)
        self._results: list[LatencyResult] = []
        self._scaled: list[dict[str, float]] = []  # milliseconds at full depth, per result
        self._listed: list[dict[str, Any]] = []

    def add(self, result: LatencyResult) -> None:
        depth = self._depth
        scaled = _scaled(result, depth) if depth else {}
        listed = result.to_json() | self._fractions.of(result) | (depth.to_json(scaled) if depth else {})
        self._results.append(result)
        self._scaled.append(scaled)
        self._listed.append(listed)

    def write(self, complete: bool) -> None:
        engine = self._engine
        if engine.mesh.is_leader and self._args.json:
            graphs = {"cuda_graph_memory_bytes": engine.graphs.memory_bytes if engine.graphs else 0}
            facts = {**self._about, **graphs, **self._fractions.to_json(), **to_json(engine)}
            write_so_far(self._args.json, facts, self._listed, complete=complete)

    def show(self) -> None:
        """Prints the tables; nothing without a result."""
        if not self._engine.mesh.is_leader or not self._results:
            return
        sizes = [size_of(result) for result in self._results]
        print_latencies(self._metric, self._results, heading(self._engine))
        print_peak_fractions(sizes, self._listed, self._fractions.ceilings)
        if self._depth:
            for size, times in zip(sizes, self._scaled, strict=True):
                print(self._depth.line(size, self._metric, times))

    @cached_property
    def _about(self) -> dict[str, Any]:
        return run_report(self._llm, reported(self._args), num_processes(self._engine))


def _check(args: argparse.Namespace, metric: str) -> None:
    fewest = 2 if metric == "tpot" else 1
    if args.output_len < fewest or args.repeat < 1 or args.warmup < 0:
        raise ValueError(
            f"--output-len must be at least {fewest}, --repeat at least 1 and --warmup at least 0, "
            f"not {args.output_len}, {args.repeat} and {args.warmup}"
        )
    check_outputs(args.json, args.profile)
    _acceptance(args, 0)


def _measure(llm: LLM, args: argparse.Namespace, input_len: int, batch_size: int, num_drafts: int) -> LatencyResult:
    return measure_latency(
        llm,
        input_len,
        args.output_len,
        batch_size=batch_size,
        warmup=args.warmup,
        repeat=args.repeat,
        seed=args.seed,
        fill_cache=_fills_cache(args),
        num_drafts=num_drafts,
        acceptance=_acceptance(args, num_drafts),
    )


def _acceptance(args: argparse.Namespace, num_drafts: int) -> AssumedAcceptance | None:
    """The assumed acceptance of drafts; None: the model decides."""
    if args.acceptance is not None:
        try:
            return AssumedAcceptance(tuple(float(rate) for rate in args.acceptance.split(",")))
        except ValueError as error:
            raise ValueError(f"--acceptance {args.acceptance}: {error}") from error
    meaningless = _fills_cache(args) or args.emulate_world is not None
    return AssumedAcceptance.default(num_drafts) if meaningless and num_drafts else None


def _profile(engine: Engine, args: argparse.Namespace) -> None:
    """Traces one more run of the last length and batch size; the other ranks run it too."""
    input_len, batch_size = args.input_len[-1], args.batch_size[-1]
    prompts = [random_prompt(engine, input_len, args.seed + i) for i in range(batch_size)]
    with chrome_trace(args.profile if engine.mesh.is_leader else None):
        generate_batch(engine, prompts, args.output_len, fill_cache=_fills_cache(args))


def _fills_cache(args: argparse.Namespace) -> bool:
    return getattr(args, "fill_cache", None) is not None


def _scaled(result: LatencyResult, depth: FullDepth) -> dict[str, float]:
    """Milliseconds of TTFT and TPOT at full depth."""
    scaled = {"ttft": depth.scale(result.ttft, mean_stages(result.prefill_stages))} if result.ttft else {}
    if result.tpot:
        scaled["tpot"] = depth.scale(result.tpot, mean_stages(result.decode_stages))
    return scaled
