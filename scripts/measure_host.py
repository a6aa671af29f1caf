"""Host time of a step on one rank of any world, without a model: what the scheduler, the plan, the batch and the
reading of tokens cost, and the Python functions that they call. Times are the engine's thread's processor times, in ms.

Each row is a fresh process: an emulated rank, with a model that computes nothing (host_world.py). "turn"
is a turn of the loop: the step, messages, and tokens handed over to callers here, as many as a rank has requests.

Examples:
    python scripts/measure_host.py --plot host.png
    python scripts/measure_host.py --worlds 64 --requests 8,32,96 --drafts 1 --arrivals
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
from typing import Any

from dsa_engine.commands.arguments import add_json_argument, argument_parser, run
from dsa_engine.measure.plots import check_plot, load_pyplot, save
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs

WARM_UP = 8  # steps before any is measured


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--worlds", default="1,2,8,64,256,1024", help="numbers of ranks")
    parser.add_argument("--requests", default="32", help="requests that decode on each rank")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that an MTP module drafts in a step")
    parser.add_argument("--prefix-caching", action="store_true", help="name full pages, as by default in serving")
    parser.add_argument("--arrivals", action="store_true", help="before each step a request ends and another comes")
    parser.add_argument("--steps", type=int, default=64, help="steps of which each time is the median")
    parser.add_argument("--cp-size", type=int, help="ranks that prefill together; default: the world, at most 64")
    parser.add_argument("--prefill", default="131072,524288", help="prompts whose prefill is measured, at world 64")
    parser.add_argument("--waiting", default="512x131072", help="prompts that wait, and their length; measures memory")
    parser.add_argument("--only", choices=("decode", "prefill", "memory"), help="default: all three")
    parser.add_argument("--plot", metavar="PNG", help="draw the times of decode steps over the number of ranks")
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one measurement, in this process
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.steps, *numbers(args.worlds), *numbers(args.requests)) < 1:
        raise ValueError("--worlds, --requests and --steps must be at least 1")
    return args


def main() -> None:
    args = parse()
    if args.case is not None:
        logging.disable(logging.INFO)
        print(json.dumps(CASES[args.only](**json.loads(args.case))))
        return
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    measured: dict[str, list[dict[str, Any]]] = {}
    if args.only in (None, "decode"):
        measured["decode"] = [
            measure(
                "decode",
                world=world,
                requests=requests,
                steps=args.steps,
                drafts=args.drafts,
                prefix_caching=args.prefix_caching,
                arrivals=args.arrivals,
                cp_size=args.cp_size,
            )
            for requests in numbers(args.requests)
            for world in numbers(args.worlds)
        ]
    if args.only in (None, "prefill"):
        measured["prefill"] = [
            measure("prefill", world=64, cp_size=args.cp_size, tokens=tokens) for tokens in numbers(args.prefill)
        ]
    if args.only in (None, "memory"):
        prompts, length = map(int, args.waiting.split("x"))
        measured["memory"] = [measure("memory", world=64, prompts=prompts, length=length)]
    for name, results in measured.items():
        print_results(name, results)
    import torch

    report = environment(torch.device("cpu"), torch.float32, 1) | {"load": os.getloadavg()[0]}
    report["law"] = law(measured)
    print(f"law of the planner: {report['law']}")
    print(f"{report['device']}, commit {report['commit']}, load of the machine {report['load']:.1f}")
    if args.json:
        write_json(args.json, report | {"options": vars(args)} | measured)
    if args.plot:
        draw(measured["decode"], args.plot)


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def measure(case: str, **options: Any) -> dict[str, Any]:
    """Runs one measurement in a process of its own, with one thread; returns the options and the results."""
    command = [sys.executable, __file__, "--only", case, "--case", json.dumps(options)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        raise RuntimeError(f"the measurement of {options} failed with status {ended.returncode}, see above")
    result = options | json.loads(ended.stdout.splitlines()[-1])
    print(f"{case}: {result}", file=sys.stderr, flush=True)
    return result


def decode(
    world: int, requests: int, steps: int, drafts: int, prefix_caching: bool, arrivals: bool, cp_size: int | None
) -> dict[str, Any]:
    """A decode step; with ``arrivals``, a step of any kind on average."""
    from host_world import host_world

    total = WARM_UP + 4 * steps
    options: dict[str, Any] = {"drafts": drafts, "cp_size": cp_size}
    options |= {"enable_prefix_caching": prefix_caching, "max_prefill_share": 0.5 if arrivals else 1.0}
    with host_world(world, requests, total, **options) as host:
        host.fill()
        before = host.arrive if arrivals else float
        for _ in range(WARM_UP):
            before()
            host.step()
        taken = [before() + host.step() for _ in range(steps)]
        # The garbage collector passes over all objects now and then: the maximum has it, the median has not.
        middle = statistics.mean(sorted(taken)[: len(taken) * 15 // 16]) if arrivals else statistics.median(taken)
        result = {"step_ms": middle * 1e3, "mean_ms": statistics.mean(taken) * 1e3, "max_ms": max(taken) * 1e3}
        result["calls"] = host.calls(steps, before)
        result |= {f"{name}_ms": seconds * 1e3 for name, seconds in host.parts(steps, before).items()}
        if not arrivals:
            result["turn_ms"] = statistics.median(host.turns(steps // 2)) * 1e3
    return result


def prefill(world: int, cp_size: int | None, tokens: int) -> dict[str, Any]:
    """Host time before the model's first launch in a step that prefills one prompt: without a prefix cache, with an
    empty one, for which its pages get digests, and with a full one, whose pages are evicted too."""
    from host_world import PAGE_SIZE, host_world

    result = {}
    for name in ("before_launch_ms", "with_digests_ms", "with_evictions_ms"):
        options = {"enable_prefix_caching": name != "before_launch_ms", "pages": 2 * tokens // PAGE_SIZE}
        with host_world(world, 0, 0, cp_size=cp_size, max_num_batched_tokens=tokens, **options) as host:
            taken = []
            for _ in range(9):
                if name == "with_digests_ms":
                    host.engine.scheduler.prefix_cache.reset()
                taken.append(host.before_launch(tokens))
            result[name] = statistics.median(taken[2:]) * 1e3  # two prompts fill the cache
    return result


def memory(world: int, prompts: int, length: int) -> dict[str, Any]:
    """Resident bytes that waiting prompts take on a rank."""
    from host_world import PAGE_SIZE, host_world

    large = {"hf_overrides": {"vocab_size": 129280}, "pages": length // PAGE_SIZE + 2}  # tokens as of a released model
    with host_world(world, 0, 0, **large) as host:
        host.queue(1, length)
        gc.collect()
        before = resident_bytes()
        host.queue(prompts, length)
        gc.collect()
        return {"gigabytes": (resident_bytes() - before) / 1e9}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


CASES: dict[str, Any] = {"decode": decode, "prefill": prefill, "memory": memory}
HEADERS = {
    "decode": ("step_ms", "turn_ms", "max_ms", "calls", "schedule_ms", "launch_ms", "read tokens_ms", "rest_ms"),
    "prefill": ("tokens", "before_launch_ms", "with_digests_ms", "with_evictions_ms"),
    "memory": ("prompts", "length", "gigabytes"),
}


def print_results(case: str, results: list[dict[str, Any]]) -> None:
    first = ("world", "requests") if case == "decode" else ("world",)
    columns = [name for name in HEADERS[case] if any(name in result for result in results)]
    rows = [
        ("x".join(str(result[name]) for name in first), *(result.get(name, "") for name in columns))
        for result in results
    ]
    titles = {
        "decode": "decode step: thread's processor time; launch without the launch itself; max with garbage collection",
        "prefill": "prefill step, before the first launch; with digests of the prompt's pages; with pages to evict too",
        "memory": "waiting prompts",
    }
    print(titles[case])
    print(format_table(("x".join(first), *(name.removesuffix("_ms") for name in columns)), rows), end="\n\n")


def law(measured: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Seconds of a decode step as a sum of three parts: of the step, of each request here, of each on other ranks; and
    of a prefill step with a full prefix cache: of the step, and of each token. Least squares of relative errors."""
    import numpy as np

    points: dict[str, list[tuple[tuple[float, ...], float]]] = {
        "decode": [
            ((1.0, r["requests"], r["requests"] * (r["world"] - 1)), r["step_ms"]) for r in measured.get("decode", ())
        ],
        "prefill": [((1.0, r["tokens"]), r["with_evictions_ms"]) for r in measured.get("prefill", ())],
    }
    parts = {}
    for name, of_name in points.items():
        if of_name:
            sizes, ms = np.array([size for size, _ in of_name]), np.array([ms for _, ms in of_name])
            stored = np.ones(sizes.shape[1], dtype=bool)
            while True:  # a part that would be negative is left out
                seconds = np.linalg.lstsq(sizes[:, stored] / ms[:, None], np.full(len(ms), 1e-3), rcond=None)[0]
                if (seconds >= 0).all():
                    break
                stored[np.flatnonzero(stored)[seconds.argmin()]] = False
            each = np.zeros(len(stored))
            each[stored] = seconds
            parts[name] = [float(f"{part:.3g}") for part in each]
    return parts


def draw(results: list[dict[str, Any]], path: str) -> None:
    """Draws host time over the number of ranks, a line for each number of requests."""
    figure, axes = load_pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    for requests in dict.fromkeys(result["requests"] for result in results):
        of = [result for result in results if result["requests"] == requests]
        axes.plot([r["world"] for r in of], [r["step_ms"] for r in of], "o-", label=f"{requests} requests a rank")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="host time of a decode step (ms)")
    axes.set_xticks([r["world"] for r in results], [str(r["world"]) for r in results])
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


if __name__ == "__main__":
    run(main)
