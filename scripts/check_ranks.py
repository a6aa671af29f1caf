"""Requests on several ranks in every way that ranks work together, compared with one process.

    scripts/check_ranks.py one FILE              one process: writes the tokens of every request
    scripts/check_ranks.py ranks FILE [CASE …]   every rank: compares (default: all cases); a failure ends the run

As many ranks as one likes may share a GPU, if NCCL takes each for a machine (NCCL_HOSTID): slow, but NCCL all the same.
Without batch_invariant a token may differ where two are nearly as likely, and the rest of its request with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.kernels.runtime.operation import error_line

TEXT = "def main():\n    key 4821 is 97\n    value 311 is 5\n"
PROMPTS = [TEXT * 40 + "key 4821 is", TEXT, [7 + i % 500 for i in range(1530)], "import os", TEXT * 12]
PARAMS = [
    SamplingParams(temperature=0.9 * (i % 2), seed=i, max_tokens=12 + i, ignore_eos=True) for i in range(len(PROMPTS))
]
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 512, "progress": False}
COMMON |= {"cache_memory": "256MiB", "enable_prefix_caching": False}
CROWD = 4  # times as many requests where some are to be preempted: on each rank a few more than its pages hold
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the ranks and of the engine, new things first
    "graphs": ({"cp_size": 4}, {}),
    "apart": ({"prefill_ranks": 2}, {}),
    "rebalancing": ({"rebalance_every": 4, "redundant_experts": 4}, {}),
    "preemption": ({"cp_size": 4}, {"cache_memory": None, "enable_prefix_caching": True}),
    "by_node": ({"cp_size": 4, "moe_dispatch": "by_node", "tp_size": 2}, {"enable_dbo": True}),
    "micro_batches": ({"cp_size": 4, "moe_dispatch": "all_to_all"}, {"enable_dbo": True}),
    "batch_invariant": ({"cp_size": 4}, {"batch_invariant": True}),
    "drafts": ({}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    "eager": ({}, {"enforce_eager": True}),
}


def generate(device: str, parallel: ParallelConfig, options: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens of every request, of the second of two calls, and what the engine did; None on ranks that only follow."""
    with LLM("demo", device=device, parallel=parallel, **COMMON | options) as llm:
        engine = llm.engine
        if parallel.prefill_ranks and not engine.mesh.is_front:
            llm.follow()
            return None
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        tokens, scheduler = [out.token_ids for out in outputs], engine.scheduler
        pages = sum(-(-(len(out.prompt_token_ids) + len(out.token_ids)) // engine.options.page_size) for out in outputs)
        return {
            "tokens": tokens,
            "bytes": pages * engine.cache.page_bytes,
            "graphs": len(engine.graphs.captured) if engine.graphs else 0,
            "ahead": engine.launched_ahead,
            "nodes": engine.mesh.nodes,
            "preemptions": scheduler.preemptions,
            "hits": scheduler.prefix_cache.hits,
            "moves": engine.rebalancing.times if engine.rebalancing else 0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("one", "ranks"))
    parser.add_argument("file", type=Path)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds until a collective fails")
    args = parser.parse_args()
    kinds = {False: {}, True: {"batch_invariant": True}}
    if args.what == "one":
        ran = [generate(args.device, ParallelConfig(), options) for options in kinds.values()]
        args.file.write_text(json.dumps(ran))
        return
    expected, leads, worst = json.loads(args.file.read_text()), os.environ.get("RANK", "0") == "0", 0
    for name in args.cases or CASES:
        parallel, options = CASES[name]
        exact, begin = "batch_invariant" in options, time.perf_counter()
        if options.get("cache_memory") == SMALL:
            options = options | {"cache_memory": int(SMALL * expected[0]["bytes"])}
        if leads:
            print(f"case {name}", flush=True)
        try:
            did = generate(args.device, ParallelConfig(timeout=args.timeout, **parallel), options)
        except BaseException as error:
            print(f"FAILED {name}: {error_line(error)}", flush=True)
            os._exit(3)  # not by way of the others, which may wait for this rank
        if leads and did is not None:
            want = expected[exact]["tokens"]
            equal = [sum(a == b for a, b in zip(*pair)) for pair in zip(did.pop("tokens"), want)]
            whole = sum(n == len(tokens) for n, tokens in zip(equal, want))
            worst |= whole < (len(want) if exact else len(want) / 2)
            print(f"{name}: {time.perf_counter() - begin:.1f} s, equal {whole} of {len(want)} {equal} {did}", flush=True)
    sys.exit(worst)


if __name__ == "__main__":
    main()
