"""Requests on several ranks, in every way that ranks work together, compared with one process.

Any number of ranks may share a GPU, if NCCL takes each for a machine (NCCL_HOSTID): slow, but NCCL all the same.
Without batch_invariant a token may differ where two are nearly as likely, and then the rest of its request.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import takewhile
from operator import eq
from pathlib import Path
from typing import Any

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.kernels.runtime.operation import error_line

TEXT = "def main():\n    key 4821 is 97\n    value 311 is 5\n"
PROMPTS: list[Any] = [TEXT * 40 + "key 4821 is", TEXT, [7 + i % 500 for i in range(1530)], "import os", TEXT * 12]
COMMON: dict[str, Any] = {"dtype": "float32", "max_model_len": 4096, "max_num_batched_tokens": 512, "progress": False}
COMMON |= {"cache_memory": "256MiB", "enable_prefix_caching": False, "max_num_seqs": 8}
CROWD, FEW_PAGES = [1, 3] * 16, 18  # short requests, of which a rank's pages hold few to their end
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # options of the ranks, and of the engine
    "graphs": ({"cp_size": 4}, {}),
    "apart": ({"prefill_ranks": 2}, {}),
    "rebalancing": ({"rebalance_every": 4, "redundant_experts": 4}, {}),
    "preemption": ({"cp_size": 4}, {"page_size": 4, "max_num_seqs": len(CROWD)}),
    "prefix": ({"cp_size": 4}, {"enable_prefix_caching": True}),
    "by_node": ({"cp_size": 4, "moe_dispatch": "by_node", "tp_size": 2}, {"enable_dbo": True}),
    "micro_batches": ({"cp_size": 4, "moe_dispatch": "all_to_all"}, {"enable_dbo": True}),
    "drafts": ({"cp_size": 4}, {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}),
    "batch_invariant": ({"cp_size": 4}, {"batch_invariant": True}),
}


def generate(numbers: list[int], parallel: ParallelConfig, **options: Any) -> dict[str, Any] | None:
    """Tokens of the requests, and what the engine did; None on ranks that only follow."""
    with LLM("demo", parallel=parallel, **COMMON | options) as llm:
        engine, scheduler = llm.engine, llm.engine.scheduler
        if parallel.prefill_ranks and not engine.mesh.is_front:
            llm.follow()
            return None
        each = [SamplingParams(temperature=0.9 * (n % 2), seed=n, max_tokens=12 + n, ignore_eos=True) for n in numbers]
        for _ in range(1 + engine.options.enable_prefix_caching):  # the second call finds pages of the first
            outputs = llm.generate([PROMPTS[n] for n in numbers], each, use_tqdm=False)
        return {
            "tokens": [output.token_ids for output in outputs],
            "token_bytes": engine.cache.page_bytes // engine.options.page_size,
            "graphs": len(engine.graphs.captured) if engine.graphs else 0,
            "ahead": engine.launched_ahead,
            "nodes": engine.mesh.nodes,
            "preempted": scheduler.preemptions,
            "hits": scheduler.prefix_cache.hits,
            "moved": engine.rebalancing.times if engine.rebalancing else 0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="tokens of one process, which writes them")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"on each rank: {', '.join(CASES)}")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    os.environ["DSA_ENGINE_DBO_ROWS"] = "1,2"  # cuts small steps too
    everything, leads, failed = [*range(len(PROMPTS))], os.environ.get("RANK", "0") == "0", False
    if not args.cases:
        kinds = False, True
        ran = [generate(everything, ParallelConfig(), device=args.device, batch_invariant=exact) for exact in kinds]
        args.file.write_text(json.dumps(ran))
    expected = json.loads(args.file.read_text())
    for name in args.cases:
        parallel, options = CASES[name]
        numbers, begin, exact = everything, time.perf_counter(), name == "batch_invariant"
        if name == "preemption":
            pages = {"cache_memory": FEW_PAGES * options["page_size"] * expected[0]["token_bytes"]}
            numbers, options = CROWD, options | pages
        if leads:
            print("case", name, flush=True)
        try:
            did = generate(numbers, ParallelConfig(timeout=40, **parallel), device=args.device, **options)
        except BaseException as error:
            print(f"FAILED {name}: {error_line(error)}", flush=True)
            os._exit(3)  # not by way of the other ranks, which may wait for this one
        if leads and did is not None:
            pairs = [*zip(did.pop("tokens"), (expected[exact]["tokens"][n] for n in numbers))]
            whole = sum(got == wanted for got, wanted in pairs)
            failed |= whole < len(pairs) * (1 if exact else 0.5)
            parted = [sum(1 for _ in takewhile(bool, map(eq, *pair))) for pair in pairs if pair[0] != pair[1]]
            at = f", others part at tokens {parted}" if parted else ""
            print(f"{name}: {time.perf_counter() - begin:.1f} s, {whole} of {len(pairs)} equal{at}, {did}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
