"""Cost of the messages about new requests: time of their exchange in a decode step, and delay of an idle engine.

torchrun --nproc-per-node 4 scripts/studies/measure_messages.py [--batch-size 8] [--input-len 2048]

Rank 0 calls and the others follow. "Messages" is the time between two decode steps in which rank 0's loop reads
and exchanges messages; "noticed" is the time from a call to an idle engine until every rank has its request; "idle" is
the fraction of a core that an idle rank uses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.measure.across_ranks import from_all_ranks
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.system.output_files import check_outputs

_IDLE_S = 3.0


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo-random", help="as of LLM")
    parser.add_argument("--batch-size", type=int, default=8, help="requests at once")
    parser.add_argument("--input-len", type=int, default=2048, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of an output")
    parser.add_argument("--repeat", type=int, default=5, help="runs, after one that is not counted")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_json_argument(parser)
    args = parser.parse_args()
    if args.output_len < 2 or min(args.repeat, args.batch_size, args.input_len) < 1:
        raise ValueError("--output-len must be at least 2, --repeat, --batch-size and --input-len at least 1")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    options = {"max_model_len": args.input_len + args.output_len, "enable_prefix_caching": False}
    llm = LLM(args.model, device=args.device, progress=False, **options)
    taken: list[tuple[float, float]] = []  # per request: when it was made and when this rank received it
    queue = llm.engine.queue

    def noted(add: Any) -> Any:
        taken.append((add.arrival, time.perf_counter()))
        return queue(add)

    llm.engine.queue = noted  # type: ignore[method-assign]
    begun = time.process_time()
    time.sleep(_IDLE_S)
    idle = (time.process_time() - begun) / _IDLE_S
    exchanges: list[float] = []
    steps: list[float] = []
    if llm.engine.mesh.rank > 0:
        llm.follow()
    else:
        with llm:
            exchanges, steps = _measured(llm, args)
    latest = [arrived - made for made, arrived in taken[:: args.batch_size]][: args.repeat + 1]
    # The loops have ended, so this thread may use the groups.
    ranks = from_all_ranks(llm.engine, [idle, *latest])
    if llm.engine.mesh.rank == 0:
        _report(llm, args, exchanges, steps, torch.tensor(ranks))


def _measured(llm: LLM, args: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of messages and of a step for the decode steps of every run."""
    exchanges: list[float] = []
    steps: list[float] = []
    for number in range(args.repeat + 1):
        seeds = range(number * args.batch_size, (number + 1) * args.batch_size)
        prompts = [random_prompt(llm.engine, args.input_len, seed) for seed in seeds]
        prefill = _spent(llm, prompts, 1)
        count, messages, step = (a - b for a, b in zip(_spent(llm, prompts, args.output_len), prefill, strict=True))
        if number:
            exchanges.append(messages / count)
            steps.append(step / count)
    return exchanges, steps


def _spent(llm: LLM, prompts: list[list[int]], output_len: int) -> tuple[float, float, float]:
    """Numbers of steps, seconds of messages and seconds of steps to generate ``output_len`` tokens per prompt."""
    loop = llm.loop
    before = loop.steps, loop.messages_s, loop.step_s
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    llm.generate(prompts, params, use_tqdm=False)
    llm.wait_idle()
    return loop.steps - before[0], loop.messages_s - before[1], loop.step_s - before[2]


def _report(llm: LLM, args: argparse.Namespace, exchanges: list[float], steps: list[float], ranks: Any) -> None:
    noticed = ranks[:, 2:].amax(dim=0).tolist()  # the slowest rank's; the first run is not counted
    result = {
        "messages_us": 1e6 * statistics.median(exchanges),
        "step_ms": 1e3 * statistics.median(steps),
        "share": statistics.median(exchanges) / statistics.median(steps),
        "noticed_ms": [1e3 * seconds for seconds in noticed],
        "idle_cores": ranks[:, 0].tolist(),
    }
    if args.json:
        write_json(args.json, run_report(llm, vars(args), llm.engine.mesh.world_size) | result)
    rows = [
        ["messages in a decode step", f"{result['messages_us']:.0f} µs"],
        ["a decode step", f"{result['step_ms']:.2f} ms"],
        ["share", f"{result['share']:.2%}"],
        ["noticed from idle, slowest", f"{max(result['noticed_ms']):.1f} ms"],
        ["cores used while idle, most", f"{max(result['idle_cores']):.1%}"],
    ]
    print(format_table([f"{llm.engine.mesh.world_size} ranks, {args.batch_size} requests", "median"], rows))


if __name__ == "__main__":
    run(main)
