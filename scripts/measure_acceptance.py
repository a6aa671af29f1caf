"""Acceptance of drafts on the trained demo model: scripts/measure_acceptance.py [--num-speculative-tokens 0,1,2,3]

Held-out text, answers about two facts of a document, and repeated passages of a document are generated greedily with
each number of drafts in turn. The script reports which drafts are accepted, and the time per token.
"""

from __future__ import annotations

import json

from demo_model.evaluation.drafting import measure_drafting, report
from demo_model.evaluation.quality import held_out
from dsa_engine.arguments import add_engine_arguments, add_json_argument, argument_parser, llm_from, reported, run
from dsa_engine.commands.bench.options import draft_counts
from dsa_engine.measure.report import format_table, run_report, write_json
from dsa_engine.system.output_files import check_outputs


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--num-speculative-tokens", type=draft_counts, default=[0, 1, 2, 3], help="drafts a step")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the prompts")
    parser.add_argument("--cases", type=int, default=10, help="prompts of each kind")
    add_json_argument(parser)
    add_engine_arguments(parser)
    args = parser.parse_args()
    check_outputs(args.json)
    max_drafts = max(args.num_speculative_tokens)
    config = json.loads(args.speculative_config) | {"num_speculative_tokens": max_drafts}
    llm = llm_from(args, speculative_config=config if max_drafts else {}, enable_prefix_caching=False)
    results = measure_drafting(llm, held_out(llm), args.length, args.cases, args.num_speculative_tokens)
    if not llm.engine.mesh.is_leader:
        return
    rows = report(results)
    if args.json:
        write_json(args.json, run_report(llm, reported(args), llm.engine.mesh.world_size) | {"results": rows})
    print(
        format_table(
            ("kind", "drafts", "tokens a step", "accepted by position", "median TPOT ms", "same tokens"),
            [
                (
                    row["kind"],
                    row["num_speculative_tokens"],
                    f"{row['mean_acceptance_length']:.2f}",
                    " ".join(f"{rate:.0%}" for rate in row["acceptance_rates"]) or "-",
                    f"{row['median_tpot_ms']:.1f}",
                    f"{row['same_tokens']} of {row['generations']}",
                )
                for row in rows
            ],
        )
    )


if __name__ == "__main__":
    run(main)
