"""Prefill: ``scripts/bench_prefill.py`` and ``dsa-engine bench prefill``."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from dsa_engine.arguments import read_text, reported
from dsa_engine.commands.bench.full_depth import FullDepth
from dsa_engine.commands.bench.peak_fractions import PeakFractions, print_peak_fractions
from dsa_engine.commands.bench.plots import plot_prefill
from dsa_engine.commands.bench.prefill_benchmark import PrefillResult, measure_prefill
from dsa_engine.commands.bench.prefill_tables import print_prefill
from dsa_engine.commands.early import Early
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM
from dsa_engine.measure.across_ranks import from_all_ranks, num_processes
from dsa_engine.measure.emulation.arguments import heading, is_emulated, measured_llm, title, to_json
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import caption, run_report, write_so_far
from dsa_engine.measure.stage_timer import chrome_trace, mean_stages
from dsa_engine.system.output_files import check_outputs, whole_file


def run_prefill(args: argparse.Namespace) -> None:
    """Prefills every prompt, and reports each as soon as it has been measured: files first, then tables.

    Raises:
        ValueError, OSError: an option, a file or a prompt is not possible; then nothing has been measured.
    """
    if args.repeat < 1 or args.warmup < 0:
        raise ValueError(f"--repeat must be at least 1 and --warmup at least 0, not {args.repeat} and {args.warmup}")
    check_outputs(args.json, args.dump_logits, args.profile, args.plot)
    check_plot(args.plot)
    text = read_text(args.prompt_file) if args.prompt_file else None
    early = Early(args)
    early.check([0] * max(args.seq_len) if text is None else early.tokenizer().encode(text))
    llm = measured_llm(args)
    engine = llm.engine
    if is_emulated(engine) and args.dump_logits:
        raise ValueError(
            "--dump-logits with --emulate-world: the logits of an emulated rank mean nothing; leave it out"
        )
    prompts = (
        [llm.tokenizer.encode(text)]
        if text is not None
        else [random_prompt(engine, n, args.seed) for n in args.seq_len]
    )
    for prompt in prompts:
        engine.check(prompt)  # check all before measuring any
    report = _Report(llm, args)
    for i, prompt in enumerate(prompts, 1):
        report.add(measure_prefill(engine, prompt, warmup=args.warmup, repeat=args.repeat))
        if engine.mesh.is_leader:
            try:
                report.write(last=i == len(prompts))
            finally:  # the tables are there even if a file cannot be written
                report.show()
    if args.profile:
        with chrome_trace(args.profile if engine.mesh.is_leader else None):  # the other ranks run too
            engine.prefill(prompts[-1])


class _Report:
    """The results so far."""

    def __init__(self, llm: LLM, args: argparse.Namespace):
        self._llm, self._args = llm, args
        self._engine: Engine = llm.engine
        self._depth = FullDepth.of(llm)
        self._fractions = PeakFractions(llm.engine)
        load = from_all_ranks(self._engine, [self._engine.load_seconds, float(self._engine.bytes_read)])
        self._loaded = {
            "load_seconds": [rank[0] for rank in load],
            "weight_bytes_read": [int(rank[1]) for rank in load],
        }
        self._results: list[PrefillResult] = []
        self._listed: list[dict[str, Any]] = []

    def add(self, result: PrefillResult) -> None:
        self._results.append(result)
        drafts = self._engine.runner.num_drafts
        work = self._fractions.prefill(result.input_len, result.ttft.median, drafts=drafts)
        self._listed.append(result.to_json() | work)
        if self._depth:
            self._listed[-1] |= self._depth.to_json(self._scaled(result))

    def write(self, last: bool) -> None:
        """Writes the files with all lengths so far, so that a later failure loses none of them."""
        args, engine = self._args, self._engine
        about = run_report(self._llm, reported(args), num_processes(engine))
        facts = {**self._fractions.to_json(), **to_json(engine), **self._loaded}
        write_so_far(args.json, {**about, **facts}, self._listed, complete=last)
        if args.dump_logits:
            with whole_file(args.dump_logits) as path, path.open("wb") as file:
                np.save(file, self._results[-1].logits.numpy())
        if args.plot:
            plot_prefill(self._results, args.plot, caption(about, title(engine)))

    def show(self) -> None:
        """Prints the tables of the last length."""
        result, engine = self._results[-1], self._engine
        if len(self._results) == 1 and is_emulated(engine):
            print(heading(engine))
        print_prefill(result, engine.mesh.rank if is_emulated(engine) else 0)
        print_peak_fractions([f"{result.input_len:,} tokens"], self._listed[-1:], self._fractions.ceilings)
        if self._depth:
            print("\n" + self._depth.line(f"{result.input_len:,} tokens", "ttft", self._scaled(result)))

    def _scaled(self, result: PrefillResult) -> dict[str, float]:
        assert self._depth is not None
        return {"ttft": self._depth.scale(result.ttft, mean_stages(result.stage_seconds))}
