"""``dsa-engine bench prefill|ttft|tpot``, which are also ``scripts/bench_prefill.py`` and ``scripts/measure_*.py``."""

from __future__ import annotations

import argparse
import json
from functools import partial
from itertools import product

import numpy as np

from dsa_engine.commands.arguments import json_object, read_text
from dsa_engine.commands.bench.generation_benchmark import check_latency, check_lengths, measure_latency
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.commands.bench.report import BenchReport
from dsa_engine.commands.early import Early
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.assumed_acceptance import AssumedAcceptance
from dsa_engine.measure.emulation.arguments import measured_llm
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.requests import random_prompt
from dsa_engine.measure.stage_timer import chrome_trace
from dsa_engine.measure.timed_generation import generate_batch, measured_prompts
from dsa_engine.system.output_files import check_outputs, whole_file


def run_prefill(args: argparse.Namespace) -> None:
    """Prefills every prompt. Files have each result once it is measured; tables have them also after Ctrl-C."""
    if args.repeat < 1 or args.warmup < 0:
        raise ValueError(f"--repeat must be at least 1 and --warmup at least 0, not {args.repeat} and {args.warmup}")
    if args.emulate_world is not None and args.dump_logits:
        raise ValueError(
            "--dump-logits with --emulate-world: the logits of an emulated rank mean nothing; leave it out"
        )
    check_outputs(args.json, args.dump_logits, args.profile, args.plot)
    check_plot(args.plot)
    text = read_text(args.prompt_file) if args.prompt_file else None
    early = Early(args)
    early.check([0] * max(args.input_len) if text is None else early.tokenizer().encode(text))
    llm = measured_llm(args)
    engine, leads = llm.engine, llm.engine.mesh.is_leader
    prompts = [random_prompt(engine, n, args.seed) for n in args.input_len]
    if text is not None:
        prompts = [llm.tokenizer.encode(text)]
    engine.limits.check(max(prompts, key=len))  # before any is measured
    report = BenchReport(llm, args, "ttft")
    try:
        for number, prompt in enumerate(prompts, 1):
            measure = partial(measure_prefill, engine, prompt, warmup=args.warmup, repeat=args.repeat)
            report.add(result := measure(), measure, last=number == len(prompts))
            if leads and args.dump_logits:
                with whole_file(args.dump_logits) as path, path.open("wb") as file:
                    np.save(file, result.logits.numpy())
        if args.profile:
            with chrome_trace(args.profile if leads else None):  # the other ranks run too
                prefill(engine, prompts[-1])
    finally:
        report.show()


def _run_latency(metric: str, args: argparse.Namespace) -> None:
    """Measures every length and batch size, as :func:`run_prefill`; the table shows ``metric``, the JSON both."""
    fewest = 2 if metric == "tpot" else 1
    if args.output_len < fewest or args.repeat < 1 or args.warmup < 0:
        raise ValueError(
            f"--output-len must be at least {fewest}, --repeat at least 1 and --warmup at least 0, "
            f"not {args.output_len}, {args.repeat} and {args.warmup}"
        )
    check_outputs(args.json, args.profile, args.plot)
    check_plot(args.plot)
    _acceptance(args, 0)
    fill_cache = getattr(args, "fill_cache", None) is not None
    counts = getattr(args, "num_speculative_tokens", None)
    if counts and max(counts):
        given = json_object(args.speculative_config, "--speculative-config")
        args.speculative_config = json.dumps(given | {"num_speculative_tokens": max(counts)})
    check_lengths(max(args.input_len), args.output_len, Early(args).max_model_len)
    llm = measured_llm(args)
    engine = llm.engine
    cases = list(product(args.input_len, args.batch_size, counts or [engine.runner.num_drafts]))
    for input_len, batch_size, _ in cases:  # check all before measuring any
        check_latency(engine, input_len, args.output_len, batch_size, fill_cache)
    report = BenchReport(llm, args, metric)
    try:
        for number, (input_len, batch_size, num_drafts) in enumerate(cases, 1):
            runs = {"batch_size": batch_size, "warmup": args.warmup, "repeat": args.repeat, "seed": args.seed}
            runs |= {"fill_cache": fill_cache, "num_drafts": num_drafts, "acceptance": _acceptance(args, num_drafts)}
            measure = partial(measure_latency, llm, input_len, args.output_len, **runs)
            report.add(measure(), measure, last=number == len(cases))
        if args.profile:
            prompts = measured_prompts(engine, input_len, batch_size, args.seed, fill_cache)
            with chrome_trace(args.profile if engine.mesh.is_leader else None):  # the other ranks run too
                generate_batch(engine, prompts, args.output_len, fill_cache=fill_cache)
    finally:
        report.show()


run_ttft, run_tpot = (partial(_run_latency, metric) for metric in ("ttft", "tpot"))


def _acceptance(args: argparse.Namespace, num_drafts: int) -> AssumedAcceptance | None:
    if args.acceptance is not None:
        try:
            return AssumedAcceptance(tuple(float(rate) for rate in args.acceptance.split(",")))
        except ValueError as error:
            raise ValueError(f"--acceptance {args.acceptance}: {error}") from error
    meaningless = getattr(args, "fill_cache", None) is not None or args.emulate_world is not None
    return AssumedAcceptance.default(num_drafts) if meaningless and num_drafts else None
