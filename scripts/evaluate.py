"""Quality of a model: [torchrun --nproc-per-node N] scripts/evaluate.py [--length 1024,8192] [engine options]

Retrieval accuracy by document length and depth of the fact, the part of the fact that the indexer selects, and the same
with random or recent tokens selected instead; perplexity of held-out text; and the MTP module's second next tokens. A
case is a document and a question; ten questions of a document are asked one after the other in one conversation, and a
case is right if every token of its greedy answer is.
"""

from __future__ import annotations

import argparse
from typing import Any

from demo_model.evaluation.cases import KINDS
from demo_model.evaluation.quality import divergence, held_out, perplexity, retrieval, second_next, summary
from demo_model.evaluation.selection import SELECTIONS
from demo_model.export import load_checkpoint
from demo_model.pictures import plot_retrieval
from dsa_engine import LLM
from dsa_engine.arguments import add_engine_arguments, argument_parser, lengths, llm_from, reported, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.measure.plots import check_plot
from dsa_engine.measure.report import caption, format_table, run_report, write_json
from dsa_engine.model_folder import resolve_model
from dsa_engine.options import Quantization
from dsa_engine.system.output_files import check_outputs


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=lengths, default=[1024, 8192], help="tokens of the documents")
    parser.add_argument(
        "--cases", type=lengths, default=[100], help="questions at each length; the last for all further"
    )
    parser.add_argument("--kind", choices=KINDS, default="fact", help="one fact, two at once, or a passage to continue")
    parser.add_argument(
        "--selection", choices=SELECTIONS, default="trained", help="replacement of the indexer's selection"
    )
    parser.add_argument("--dense", action="store_true", help="dense attention: index_topk is the longest length")
    parser.add_argument("--perplexity", type=int, default=0, metavar="N", help="held-out texts of 2,048 tokens")
    parser.add_argument(
        "--kl-to", metavar="MODEL", help="on the texts of --perplexity, also the KL divergence from MODEL in float32"
    )
    parser.add_argument("--mtp", type=int, default=0, metavar="N", help="the MTP module on N texts and N conversations")
    parser.add_argument("--json", metavar="PATH", help="write the result here; '-': to standard output")
    parser.add_argument("--plot", metavar="PATH", help="draw length by depth (PNG)")
    add_engine_arguments(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    check_outputs(args.json, args.plot)
    check_plot(args.plot)
    if args.kl_to and not args.perplexity:
        raise ValueError("--kl-to is measured on the texts of --perplexity; say how many")
    if args.dense:
        args.hf_overrides = f'{{"index_topk": {max(args.length) + 1024}}}'
    llm = llm_from(args)
    first = llm.engine.mesh.rank == 0
    documents = held_out(llm)
    results = []
    for i, length in enumerate(args.length):
        count = args.cases[min(i, len(args.cases) - 1)]
        cases = retrieval(llm, documents, length, count, kind=args.kind, select=args.selection)
        results.append(summary(cases) | {"right": [case.right for case in cases]})
        if first:
            print(f"{length:,} tokens: {results[-1]['accuracy']:.1%} of {count} right", flush=True)
    report: dict[str, Any] = {"retrieval": results}
    if args.perplexity:
        report["perplexity"] = perplexity(llm, documents, 2048, args.perplexity)
    if args.kl_to:
        other = resolve_model(args.kl_to)
        stored = ModelConfig.from_pretrained(other).quantization
        dequantize: Quantization | None = "dequantize" if stored else None
        reference = LLM(other, dtype="float32", quantization=dequantize, device=args.device, progress=False)
        report["divergence"] = divergence(llm, reference, documents, 2048, args.perplexity)
    report["weight_bytes"] = sum(tensor.nbytes for tensor in llm.engine.model.parameters())
    if args.mtp:
        report["mtp"] = second_next(load_checkpoint(llm.folder), documents, 1024, args.mtp)
    if not first:
        return
    about = run_report(llm, reported(args), llm.engine.mesh.world_size)
    if args.json:
        write_json(args.json, about | report)
    if args.plot:
        title = f"{args.kind}, index_topk {llm.engine.config.index_topk}, selection: {args.selection}"
        plot_retrieval(results, args.plot, f"{title}\n{caption(about)}")
    show(report)


def show(report: dict) -> None:
    rows = [
        (
            f"{r['length']:,}",
            r["cases"],
            f"{r['accuracy']:.1%}",
            f"{r['tokens_right']:.1%}",
            "-" if r["value_found"] is None else f"{r['value_found']:.1%}",
            " ".join(f"{recall:.0%}" for recall in r["recall_by_layer"]) or "-",
        )
        for r in report["retrieval"]
    ]
    print("\n" + format_table(("tokens", "cases", "right", "tokens right", "value selected", "recall by layer"), rows))
    if "perplexity" in report:
        print("\nheld-out text: {loss:.3f} nats a token, perplexity {perplexity:.2f}".format(**report["perplexity"]))
    if "divergence" in report:
        figures = report["divergence"]
        print(f"KL divergence {figures['kl']:.2e} nats a token, the same token {figures['same_greedy_token']:.2%}")
    for name, figures in report.get("mtp", {}).items():
        print(
            f"MTP, {name}: second next token right {figures['module_right']:.1%}, as the main model says "
            f"{figures['module_agrees']:.1%}; the main model is right {figures['main_model_right']:.1%}"
        )


if __name__ == "__main__":
    run(main)
