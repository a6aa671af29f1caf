"""``dsa-engine plan``: the best use of some devices for a model and its requests, as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from dsa_engine.commands.arguments import json_object
from dsa_engine.commands.planner.demand import ACCEPTANCE, CACHES, DRAFTS, WEIGHTS, Demand
from dsa_engine.commands.planner.devices import DEVICES, device_named
from dsa_engine.config.released import RELEASED_CONFIGS
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes

if TYPE_CHECKING:
    from dsa_engine.commands.planner.search import Plan, Planner

# Settings that an option fixes, by their names in a Deployment.
FIXED = ("cp_size", "dcp_size", "tp_size", "chunk", "drafts", "weights", "cache", "hot_rows")
NOT_KNOWN = (
    "Modelled: no such run was measured. A range goes from the fastest kernels that are known to ours, as measured on\n"
    "one H100. The host was measured without a model, on a CPU (scripts/measure_host.py). Not counted: queueing,\n"
    "ranks that wait for each other, and uneven loads of experts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(RELEASED_CONFIGS)
    parser.add_argument("--model", default="deepseek_v32", help=f"a folder, a hub id, or one of {names}")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    parser.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), help="dummy: commands that need no checkpoint"
    )
    parser.add_argument("--device", default="H200", help=f"one of {', '.join(DEVICES)}")
    parser.add_argument("--devices", type=int, default=8, help="number of devices")
    parser.add_argument("--input-len", type=int, default=131072, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--ttft", type=float, metavar="SECONDS", help="limit of the time to first token")
    parser.add_argument("--tpot", type=float, metavar="SECONDS", help="limit of the time per output token")
    parser.add_argument("--requests", type=int, help="number of concurrent requests; default: the best")
    parser.add_argument("--acceptance", metavar="RATES", help="acceptance of drafts by position, such as 0.85,0.7")
    for option, about in (
        ("--cp-size", "ranks that prefill a prompt together"),
        ("--dcp-size", "ranks of them that hold its cache together; default: 1, or the fewest with which it fits"),
        ("--tp-size", "ranks that divide embedding, o_proj and LM head"),
        ("--hot-rows", "latent rows of a request on the device, whose others lie in host memory; default: all"),
        ("--chunk", "tokens of a rank in a prefill step (--max-num-batched-tokens of the engine)"),
    ):
        parser.add_argument(option, type=int, help=f"fix it: {about}")
    parser.add_argument("--drafts", type=int, choices=DRAFTS, help="fix the drafts of the MTP module in a step")
    parser.add_argument("--weights", choices=WEIGHTS, help="format of weights; default: the checkpoint's, or bfloat16")
    parser.add_argument("--cache", choices=CACHES, help="format of caches; default: bfloat16, or fp8 if weights are")
    parser.add_argument(
        "--libraries", action="store_true", help="the best with the fastest kernels of libraries, not with our own"
    )
    parser.add_argument("--json", metavar="PATH", help="write the plan here too; '-': to standard output")


def run_plan(args: argparse.Namespace) -> None:
    from dsa_engine.commands.planner.launch import commands, shell_lines
    from dsa_engine.commands.planner.predict import BEST, OWN
    from dsa_engine.commands.planner.search import Planner
    from dsa_engine.weights.model_folder import model_config

    check_outputs(args.json)
    try:
        acceptance = tuple(map(float, args.acceptance.split(","))) if args.acceptance is not None else ACCEPTANCE
    except ValueError as error:
        raise ValueError(f"--acceptance {args.acceptance}: {error}") from error
    asked = (args.devices, args.input_len, args.output_len, args.ttft, args.tpot, args.requests)
    demand, device = Demand(*asked, acceptance), device_named(args.device)
    fixed = {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None}
    for name, value in fixed.items():
        if isinstance(value, int) and value < (name != "drafts"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    config = model_config(args.model, json_object(args.hf_overrides, "--hf-overrides"))
    planner = Planner(config, device, demand, fixed, BEST if args.libraries else OWN)
    best = planner.best()
    plan, fast = planner.again(best, OWN), planner.again(best, BEST)
    print(f"{args.model} on {args.devices} × {device.name} ({device.source}), {args.input_len:,} tokens in, ", end="")
    print(f"{args.output_len:,} out; modelled\n")
    print(format_table(("", "best"), _rows(planner, plan, fast, best.misses(demand))))
    runs = commands(planner, plan, args.model, args.hf_overrides, args.load_format == "dummy")
    where = "Commands that run it"
    if "--nnodes" in runs["serve"]:
        where += ", on every node; all reach FIRST_HOST"
    if plan.instances > 1:
        where += f"; {plan.instances} times, with devices and ports of its own for each instance"
    print("", NOT_KNOWN, "", f"{where}:", *(f"\n{shell_lines(words)}" for words in runs.values()), sep="\n")
    if args.json:
        about = {"modelled": True, "model": args.model, "device": device.name, "demand": vars(demand), "commands": runs}
        about |= {
            "ttft_s": [fast.ttft, plan.ttft],
            "tpot_ms": [1e3 * fast.tpot, 1e3 * plan.tpot],
            "output_tokens_per_s_per_device": [plan.tokens_per_s, fast.tokens_per_s],
            "concurrent_requests": plan.requests,
            "misses_by": plan.misses(demand),
            "weight_bytes": planner.placed(plan.decode.how).weight_bytes,
            "instances": plan.instances,
            "prefill": {**vars(plan.prefill), "how": vars(plan.prefill.how)},
            "decode": {**vars(plan.decode), "how": vars(plan.decode.how)},
        }
        write_json(args.json, about)


def _rows(planner: Planner, plan: Plan, fast: Plan, missed: float) -> list[tuple[str, str]]:
    prefill, decode = plan.prefill, plan.decode
    how = decode.how
    rows = [
        ("instances × ranks", f"{plan.instances} × {how.ranks}"),
        ("meets what is asked", f"no, by {_rough(100 * missed)}%" if missed else "yes"),
        ("TTFT, s", _range(fast.ttft, plan.ttft)),
        ("TPOT, ms", _range(1e3 * fast.tpot, 1e3 * plan.tpot)),
        ("of it under prefills of others", f"{plan.waited / plan.tpot:.0%}"),
        ("concurrent requests", f"{plan.requests:,}"),
        ("output tokens/s a device", _range(plan.tokens_per_s, fast.tokens_per_s)),
        ("weights", how.weights),
        ("caches", how.cache),
        ("weights on a rank", format_bytes(planner.placed(how).weight_bytes)),
        ("free memory on a rank, GiB", _rough(decode.room / 2**30)),
        ("drafts", str(how.drafts)),
        ("tp_size", str(how.tp_size)),
        ("cp_size", str(prefill.how.cp_size)),
        ("dcp_size", str(how.dcp_size)),
        ("max_num_batched_tokens", f"{prefill.how.chunk:,}"),
    ]
    if how.dcp_size > 1:
        placed, rows_of_rank = planner.placed(how), cdiv(decode.requests, how.ranks) * (1 + how.drafts)
        sent = sum(one.sent for one in placed.decode_exchanges(rows_of_rank)[planner.config.has_indexer])
        held = planner.demand.longest * placed.token_bytes / how.dcp_size
        rows.append(("a request's cache on a rank", format_bytes(held)))
        rows.append(("sent by a rank in a layer's attention in decode", format_bytes(sent)))
    if how.hot_rows:
        rows.append(("hot_rows", f"{how.hot_rows:,}"))
        rows.append(("a token on the device", f"{planner.placed(how).device_bytes:,} B"))
        spilled = planner.placed(how).spilled(planner.demand.longest, decode.requests)
        rows.append(("host memory of a rank", format_bytes(spilled)))
    for phase, one in (("prefill", prefill), ("decode", decode)):
        longest = sorted(one.stages, key=lambda name: -one.stages[name])[:2]
        total = sum(one.stages.values())
        fractions = ", ".join(f"{name} {one.stages[name] / total:.0%}" for name in longest)
        rows.append((f"dispatch in {phase}", one.dispatch + (", enable_dbo" if one.micro_batches > 1 else "")))
        rows.append((f"most of {phase}", fractions))
        when, device = ("and then", "beside")[phase == "decode"], total - one.stages["host"]
        rows.append((f"host in {phase}, ms", f"{_rough(1e3 * one.host)}, {when} {_rough(1e3 * device)} of the device"))
    return rows


def _range(low: float, high: float) -> str:
    return f"{_rough(low)} to {_rough(high)}"


def _rough(value: float) -> str:
    """Two significant digits."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
