"""``dsa-engine plan``: the best use of some devices for a model and its requests, as a table."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from dsa_engine.arguments import json_object
from dsa_engine.commands.planner.demand import ACCEPTANCE, CACHES, DRAFTS, WEIGHTS, Demand
from dsa_engine.commands.planner.devices import DEVICES, device_named
from dsa_engine.config.released import RELEASED_CONFIGS
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes

if TYPE_CHECKING:
    from dsa_engine.commands.planner.search import Plan, Planner

# Settings that an option fixes, by their names in a Deployment.
FIXED = ("cp_size", "tp_size", "chunk", "drafts", "weights", "cache")
NOT_KNOWN = (
    "Modelled: nothing was measured, and the ends of a range are kernels as others have published them and ours as\n"
    "estimated, a third slower. Not counted: queueing, and uneven loads of experts."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(RELEASED_CONFIGS)
    parser.add_argument("--model", default="deepseek_v32", help=f"a folder with a config.json, or one of {names}")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
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
        ("--tp-size", "ranks that divide embedding, o_proj and LM head"),
        ("--chunk", "tokens of a rank in a prefill step (--max-num-batched-tokens of the engine)"),
    ):
        parser.add_argument(option, type=int, help=f"fix it: {about}")
    parser.add_argument("--drafts", type=int, choices=DRAFTS, help="fix the drafts of the MTP module in a step")
    parser.add_argument("--weights", choices=WEIGHTS, help="fix the format of weights")
    parser.add_argument("--cache", choices=CACHES, help="fix the format of caches")
    parser.add_argument("--json", metavar="PATH", help="write the plans here too; '-': to standard output")


def run_plan(args: argparse.Namespace) -> None:
    """Prints the best plan on shared devices beside the best one with devices apart for prefill and decode.

    Raises:
        ValueError, OSError: an option or the configuration is not possible, or nothing fits.
    """
    from dsa_engine.commands.planner.search import NothingFits, Planner
    from dsa_engine.model_folder import model_config

    check_outputs(args.json)
    acceptance = ACCEPTANCE if args.acceptance is None else _rates(args.acceptance)
    asked = (args.devices, args.input_len, args.output_len, args.ttft, args.tpot, args.requests)
    demand, device = Demand(*asked, acceptance), device_named(args.device)
    fixed = {name: getattr(args, name) for name in FIXED if getattr(args, name) is not None}
    for name, value in fixed.items():
        if isinstance(value, int) and value < (name != "drafts"):
            raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {value}")
    planner = Planner(model_config(args.model, json_object(args.hf_overrides, "--hf-overrides")), device, fixed)
    plans = {"together": planner.best(demand)}
    why_not = ""
    if args.devices > 1:
        try:
            plans["split"] = planner.best(demand, split=True)
        except NothingFits as error:
            why_not = f"\nsplit: {error}"
    columns = [_column(planner, plan, demand) for plan in plans.values()]
    rows = [(name, *(column.get(name, "") for column in columns)) for name in columns[0]]
    print(f"{args.model} on {args.devices} × {device.name} ({device.source}), {args.input_len:,} tokens in, ", end="")
    print(f"{args.output_len:,} out; modelled\n\n" + format_table(("", *plans), rows) + why_not + f"\n\n{NOT_KNOWN}")
    if args.json:
        about = {"modelled": True, "model": args.model, "device": device.name, "demand": vars(demand)}
        write_json(args.json, about | {name: _to_json(planner, plan, demand) for name, plan in plans.items()})


def _column(planner: Planner, plan: Plan, demand: Demand) -> dict[str, str]:
    """The rows of a plan."""
    prefill, decode = plan.prefill, plan.decode
    low = _fast(planner, plan, demand)
    count = f"{plan.decode_instances} × {decode.how.ranks}"
    if plan.split:
        count = f"{plan.prefill_instances} × {prefill.how.ranks} + {count}"
    misses = f"no, by {_rough(100 * plan.misses(demand))}%" if plan.misses(demand) else "yes"
    rows = {
        "devices": count,
        "meets what is asked": misses,
        "TTFT, s": _range(low.ttft, plan.ttft),
        "TPOT, ms": _range(1e3 * low.tpot, 1e3 * plan.tpot),
        "concurrent requests": f"{plan.requests:,}",
        "output tokens/s a device": _range(plan.tokens_per_s / plan.devices, low.tokens_per_s / plan.devices),
        "bound by": plan.limit,
        "weights": decode.how.weights,
        "caches": decode.how.cache,
        "weights on a rank": format_bytes(planner.weight_bytes(decode.how)),
        "memory left on a rank": format_bytes(decode.room),
        "drafts": str(decode.how.drafts),
        "tp_size": str(decode.how.tp_size),
        "cp_size in prefill": str(prefill.how.cp_size),
        "max_num_batched_tokens": f"{prefill.how.chunk:,}",
    }
    for phase, one in (("prefill", prefill), ("decode", decode)):
        longest = sorted(one.stages, key=lambda name: -one.stages[name])[:2]
        total = sum(one.stages.values())
        rows[f"dispatch in {phase}"] = one.dispatch + (", enable_dbo" if one.micro_batches > 1 else "")
        rows[f"most of {phase}"] = ", ".join(f"{name} {one.stages[name] / total:.0%}" for name in longest)
    if plan.split:
        rows["KV transfer after the prefill, ms"] = _rough(1e3 * plan.transfer)
    return rows


def _fast(planner: Planner, plan: Plan, demand: Demand) -> Plan:
    """The plan with kernels as others have published them."""
    from dsa_engine.commands.planner.roofline import PUBLISHED

    return planner.again(plan, demand, PUBLISHED)


def _to_json(planner: Planner, plan: Plan, demand: Demand) -> dict[str, Any]:
    low = _fast(planner, plan, demand)
    return {
        "ttft_s": [low.ttft, plan.ttft],
        "tpot_ms": [1e3 * low.tpot, 1e3 * plan.tpot],
        "output_tokens_per_s_per_device": [plan.tokens_per_s / plan.devices, low.tokens_per_s / plan.devices],
        "concurrent_requests": plan.requests,
        "misses_by": plan.misses(demand),
        "limit": plan.limit,
        "weight_bytes": planner.weight_bytes(plan.decode.how),
        **{
            phase: {"instances": count, **vars(one), "how": vars(one.how)}
            for phase, one, count in (
                ("prefill", plan.prefill, plan.prefill_instances),
                ("decode", plan.decode, plan.decode_instances),
            )
        },
    }


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError as error:
        raise ValueError(f"--acceptance {text}: {error}") from error


def _range(low: float, high: float) -> str:
    return f"{_rough(low)} to {_rough(high)}"


def _rough(value: float) -> str:
    """Two significant digits."""
    rounded = float(f"{value:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:g}"
