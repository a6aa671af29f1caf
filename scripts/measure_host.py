"""Host time of a step on one rank of any world, without a model: what the scheduler, the plan, the batch and the
reading of tokens cost, and the Python functions that they call. Times are the engine's thread's processor times, in ms.

Each row is a fresh process: an emulated rank, with a model that computes nothing (host_world.py). "turn"
is a turn of the loop: the step, messages, and tokens handed over to callers here, as many as a rank has requests; with
--streams there is a stream for each request of the world, as rank 0 of a server has.

Examples:
    python scripts/measure_host.py --json host.json
    python scripts/measure_host.py --worlds 64 --requests 8,32,96 --drafts 1 --arrivals
    python scripts/measure_host.py --worlds 64 --requests 8,32 --streams
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, run
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from host_world import PAGE_SIZE, WARM_UP, HostWorld


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--worlds", type=lengths, default=[1, 2, 8, 64, 256, 1024], help="numbers of ranks")
    parser.add_argument("--requests", type=lengths, default=[32], help="requests that decode on each rank")
    parser.add_argument("--drafts", type=int, default=0, help="tokens that an MTP module drafts in a step")
    parser.add_argument("--prefix-caching", action="store_true", help="name full pages, as by default in serving")
    parser.add_argument("--arrivals", action="store_true", help="before each step a request ends and another comes")
    parser.add_argument("--streams", action="store_true", help="measure turns with a stream for every request instead")
    parser.add_argument("--steps", type=int, default=64, help="steps of which each time is the median")
    prefill = "prompts whose prefill is measured, at world 64"
    parser.add_argument("--prefill", type=lengths, default=[131_072, 524_288], help=prefill)
    parser.add_argument("--case", help=argparse.SUPPRESS)  # one measurement, in this process
    add_json_argument(parser)
    args = parser.parse_args()
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, not {args.steps}")
    if args.case is not None:
        logging.disable(logging.INFO)
        case, options = json.loads(args.case)
        print(json.dumps(CASES[case](**options)))
        return
    check_outputs(args.json)
    given = {name: getattr(args, name) for name in ("steps", "drafts", "prefix_caching", "arrivals")}
    sizes = [{"world": world, "requests": count} for count in args.requests for world in args.worlds]
    if args.streams:
        measured = {"streams": [measure("streams", **size, steps=args.steps) for size in sizes]}
    else:
        measured = {
            "decode": [measure("decode", **size, **given) for size in sizes],
            "prefill": [measure("prefill", world=64, tokens=tokens) for tokens in args.prefill],
        }
    for name, of_name in measured.items():
        title, columns = TABLES[name]
        rows = [tuple(result.get(column, "") for column in columns) for result in of_name]
        print(title)
        print(format_table([column.removesuffix("_ms") for column in columns], rows), end="\n\n")
    report = environment(torch.device("cpu"), torch.float32, 1) | {"load": os.getloadavg()[0]}
    if not args.streams:
        report["law"] = law(measured)
        print(f"law of the planner: {report['law']}")
    print(f"{report['device']}, commit {report['commit']}, load of the machine {report['load']:.1f}")
    if args.json:
        write_json(args.json, report | {"options": vars(args)} | measured)


def measure(case: str, **options: Any) -> dict[str, Any]:
    """Runs one measurement in a process of its own, with one thread; returns the options and the results."""
    command = [sys.executable, __file__, "--case", json.dumps((case, options))]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if ended.returncode:
        raise RuntimeError(f"the measurement of {options} failed with status {ended.returncode}, see above")
    result = options | json.loads(ended.stdout.splitlines()[-1])
    print(f"{case}: {result}", file=sys.stderr, flush=True)
    return result


def decode(world: int, requests: int, steps: int, drafts: int, prefix_caching: bool, arrivals: bool) -> dict[str, Any]:
    """A decode step; with ``arrivals``, a step of any kind on average."""
    options: dict[str, Any] = {"enable_prefix_caching": prefix_caching, "max_prefill_share": 0.5 if arrivals else 1.0}
    with HostWorld(world, requests, WARM_UP + 4 * steps, drafts=drafts, **options) as host:
        host.fill()
        before = host.arrive if arrivals else float
        for _ in range(WARM_UP):
            before()
            host.step()
        taken = [before() + host.step() for _ in range(steps)]
        # The garbage collector passes over all objects now and then: the maximum has it, the median has not.
        middle = statistics.mean(sorted(taken)[: len(taken) * 15 // 16]) if arrivals else statistics.median(taken)
        result = {"step_ms": middle * 1e3, "max_ms": max(taken) * 1e3, "calls": host.calls(steps, before)}
        if not arrivals:
            result["turn_ms"] = statistics.median(host.turns(steps // 2)) * 1e3
    return result


def streams(world: int, requests: int, steps: int) -> dict[str, Any]:
    """A turn with a stream for every request of the world: of tasks here, and of another process."""
    result = {}
    for name, relayed in (("tasks", False), ("relay", True)):
        with HostWorld(world, requests, 20_000) as host:
            seconds, result[f"{name}_calls"] = host.streamed(steps, relayed)
            result[f"{name}_ms"] = seconds * 1e3
    return result


def prefill(world: int, tokens: int) -> dict[str, Any]:
    """Host time before the model's first launch in a step that prefills one prompt: without a prefix cache, with an
    empty one, for which its pages get digests, and with a full one, whose pages are evicted too."""
    result = {}
    for name in ("before_launch_ms", "with_digests_ms", "with_evictions_ms"):
        options = {"enable_prefix_caching": name != "before_launch_ms", "pages": 2 * tokens // PAGE_SIZE}
        with HostWorld(world, 0, 0, max_num_batched_tokens=tokens, **options) as host:
            taken = []
            for _ in range(9):
                if name == "with_digests_ms":
                    host.engine.scheduler.prefix_cache.reset()
                taken.append(host.before_launch(tokens))
            result[name] = statistics.median(taken[2:]) * 1e3  # two prompts fill the cache
    return result


CASES: dict[str, Any] = {"decode": decode, "streams": streams, "prefill": prefill}
# Of each table the title and the columns.
TABLES = {
    "decode": (
        "decode step: thread's processor time, without the launch itself; max with garbage collection",
        ("world", "requests", "step_ms", "turn_ms", "max_ms", "calls"),
    ),
    "streams": (
        "turn with a stream for every request of the world, which tasks of an event loop here take, or another process",
        ("world", "requests", "tasks_ms", "tasks_calls", "relay_ms", "relay_calls"),
    ),
    "prefill": (
        "prefill step, before the first launch; with digests of the prompt's pages; with pages to evict too",
        ("world", "tokens", "before_launch_ms", "with_digests_ms", "with_evictions_ms"),
    ),
}


def law(measured: dict[str, list[dict[str, Any]]]) -> dict[str, list[float]]:
    """Seconds of a decode step as a sum of three parts: of the step, of each request here, of each on other ranks; and
    of a prefill step with a full prefix cache: of the step, and of each token. Least squares of relative errors."""
    points = {
        "decode": [(1, r["requests"], r["requests"] * (r["world"] - 1), r["step_ms"]) for r in measured["decode"]],
        "prefill": [(1, r["tokens"], r["with_evictions_ms"]) for r in measured["prefill"]],
    }
    parts = {}
    for name, of_name in points.items():
        if of_name:
            table = np.array(of_name, dtype=float)
            sizes, seconds = table[:, :-1] / table[:, -1:], np.full(table.shape[1] - 1, -1.0)
            while (seconds < 0).any():  # a part that would be negative is left out
                seconds = np.linalg.lstsq(sizes, np.full(len(sizes), 1e-3), rcond=None)[0].round(15)
                sizes[:, seconds.argmin()] *= seconds.min() >= 0
            parts[name] = [float(f"{part:.3g}") for part in seconds]
    return parts


if __name__ == "__main__":
    run(main)
