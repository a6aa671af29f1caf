"""Quality of the demo model: [torchrun --nproc-per-node N] scripts/evaluate.py [--length 1024,8192] [engine options]

Retrieval by length of the document; --json has each case, with the depth of its fact. A case is a document and a
question; it is right if every token of its greedy answer is. With --hf-overrides '{"index_topk": 9216}' attention is
dense up to that length.
"""

from __future__ import annotations

import argparse
from typing import Any

from demo_model.evaluation import held_out, retrieval
from dsa_engine.commands.arguments import (
    add_engine_arguments,
    add_json_argument,
    argument_parser,
    lengths,
    llm_from,
    reported,
    run,
)
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.system.output_files import check_outputs


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=lengths, default=[1024, 8192], help="tokens of the documents")
    parser.add_argument("--cases", type=int, default=100, help="questions at each length")
    add_json_argument(parser)
    add_engine_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_outputs(args.json)
    llm = llm_from(args)
    documents = held_out()
    results: dict[int, dict[str, Any]] = {}
    for length in args.length:
        cases = retrieval(llm, documents, length, args.cases)
        results[length] = {"right": sum(right for _, right in cases) / len(cases), "cases": cases}
    if not llm.engine.mesh.is_leader:
        return
    if args.json:
        write_json(args.json, run_report(llm, reported(args), llm.engine.mesh.world_size) | {"retrieval": results})
    rows = [(f"{length:,}", len(result["cases"]), f"{result['right']:.1%}") for length, result in results.items()]
    print(format_table(("tokens", "cases", "right"), rows))


if __name__ == "__main__":
    run(main)
