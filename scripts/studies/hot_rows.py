"""Latent rows that a decode step has to fetch from host memory, by the number of hot rows of a request:

    PYTHONPATH=scripts python scripts/studies/hot_rows.py --plot hot_rows.png

The demo model answers questions about a document and goes on; its selections are recorded, and replayed by a model of
hot rows that are replaced by their last use, and by the engine's own resolver. Then what the misses cost DeepSeek-V3.2
on 8 H200 at 128K.
"""

from __future__ import annotations

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from demo import question
from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.arguments import add_json_argument, argument_parser, run
from dsa_engine.commands.planner.demand import Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.devices import DEVICES
from dsa_engine.commands.planner.predict import OWN, predict_decode
from dsa_engine.kernels.rows.resolve_rows import COLUMNS, resolve_rows
from dsa_engine.measure.plots import check_plot, load_pyplot, save
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.weights.model_folder import model_config

FACTORS = (1, 1.5, 2, 3, 4, 8, 16)  # hot rows of a request, in index_topk
DEPTHS = (0.1, 0.5, 0.9)  # of the facts that are asked for
RANKS, CONTEXT, PCIE = 8, 131072, 50e9  # bytes a second of a device and its host, of the 64 of PCIe 5.0 x16


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=32768, help="maximum number of tokens of the document")
    parser.add_argument("--output-len", type=int, default=96, help="tokens of an answer, past its end")
    parser.add_argument("--plot", metavar="PATH", help="draw the misses to a PNG file")
    add_json_argument(parser)
    args = parser.parse_args()
    check_plot(args.plot)
    llm = LLM("demo", dtype="float32", device="cpu", cache_memory="2GiB")
    topk = llm.engine.model.config.index_topk
    recorded = [selections(llm, depth, args) for depth in DEPTHS]
    sizes = [int(factor * topk) for factor in FACTORS]
    layers = np.array([[[misses(of, size) for of in one] for one in recorded] for size in sizes]) / topk
    by_size = layers.mean(axis=(1, 2))
    own = np.array([np.mean([[resolved(of, size) for of in one] for one in recorded]) for size in sizes]) / topk
    rows = [[size, *of.mean(axis=0), *both] for size, of, *both in zip(sizes, layers, by_size, own, strict=True)]
    names = [f"layer {number}" for number in range(layers.shape[2])]
    print(
        format_table(
            ("hot rows", *names, "mean", "engine"), [[size, *(f"{x:.1%}" for x in some)] for size, *some in rows]
        )
    )
    print(f"\nmisses, of the {topk} rows of a step; {len(DEPTHS)} answers of {args.output_len} tokens\n")
    print(format_table(("hot rows", "requests", "tokens/s", "of it fetching", "x"), modelled(by_size)))
    if args.plot:
        draw(args.plot, sizes, [*layers.mean(axis=1).T, own], [*names, "the engine, mean"])
    if args.json:
        about = environment(llm.engine.mesh.device, llm.engine.dtype, 1)
        write_json(
            args.json,
            about
            | {"hot_rows": sizes, "index_topk": topk, "misses": layers.mean(axis=1).tolist(), "engine": own.tolist()},
        )


def selections(llm: LLM, depth: float, args: Namespace) -> np.ndarray:
    """int32 ``[layers, tokens, index_topk]``: the positions that the queries of an answer selected."""
    asked = question(llm.tokenizer, Namespace(prompt_file=None, tokens=args.tokens, depth=depth))
    count = args.output_len
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, selection=count)
    (output,) = llm.generate([asked.prompt], params)
    selection = output.outputs[0].selection
    assert selection is not None
    return selection.positions


def misses(steps: Iterable[Sequence[int]], size: int) -> float:
    """Mean number of rows that a step lacks, after the first one, which lacks all."""
    hot: OrderedDict[int, None] = OrderedDict()  # least recently used first
    counts = []
    for step in steps:
        chosen = [position for position in map(int, step) if position >= 0]
        lacking = [position for position in chosen if position not in hot]
        hot |= dict.fromkeys(chosen)
        for position in chosen:
            hot.move_to_end(position)
        while len(hot) > size:
            hot.popitem(last=False)
        counts.append(len(lacking))
    return float(np.mean(counts[1:]))


def resolved(steps: np.ndarray, size: int) -> float:
    """The same of the engine's resolver, for one request in a set of hot rows."""
    pages, (row_of, stamp) = int(steps.max()) // 64 + 2, torch.full((2, 2, size), -1, dtype=torch.int32)
    tables = torch.full((pages, 64), -1, dtype=torch.int32), row_of, stamp.zero_()
    of_set, first = torch.zeros(2, COLUMNS, dtype=torch.int64), 0
    for number, step in enumerate(torch.from_numpy(np.ascontiguousarray(steps))):
        resolve_rows(step[None], torch.zeros(1, dtype=torch.int32), *tables, of_set, limit=0)
        first = int(of_set[0, -1]) if number == 0 else first
    return (int(of_set[0, -1]) - first) / (len(steps) - 1)


def modelled(parts: Sequence[float]) -> list[list[object]]:
    """By hot rows: the largest number of requests of a device, tokens a second of all, the part of the step that reads
    from host memory, and the ratio to a cache that lies on the device."""
    placed = Placed(model_config("deepseek_v32", {}), DEVICES["H200"], Deployment(RANKS, RANKS, cache="fp8"))
    config, layers = placed.config, placed.config.num_hidden_layers
    latent = layers * placed.cache.latent.row_bytes
    keys, demand = placed.token_bytes - latent, Demand(RANKS, CONTEXT, 1)

    def rate(bytes_each: float, fetched: float) -> tuple[int, float, float]:
        requests = next(n for n in range(1, 4096) if (n + 1) * bytes_each > placed.cache_room(n + 1))
        fetching = requests * fetched / PCIE
        seconds = predict_decode(placed, RANKS * requests, demand, OWN).seconds + fetching
        return requests, RANKS * requests / seconds, fetching / seconds

    on_device = rate(CONTEXT * placed.token_bytes, 0.0)
    table: list[list[object]] = [["all", on_device[0], f"{on_device[1]:.0f}", "0%", "1"]]
    for factor, part in zip(FACTORS, parts, strict=True):
        hot = int(factor * config.index_topk)
        requests, tokens, fetching = rate(CONTEXT * keys + hot * latent, part * config.index_topk * latent)
        table.append([f"{hot:,}", requests, f"{tokens:.0f}", f"{fetching:.0%}", f"{tokens / on_device[1]:.2f}"])
    return table


def draw(path: str, sizes: Sequence[int], of_layers: Sequence[np.ndarray], names: Sequence[str]) -> None:
    figure, axes = load_pyplot().subplots(figsize=(6, 4), layout="tight")
    for name, of in zip(names, of_layers, strict=True):
        axes.plot(sizes, 100 * of, marker="o", label=name)
    axes.set(xscale="log", xlabel="hot rows of a request", ylabel="misses, % of the rows of a step", ylim=(0, None))
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.legend()
    save(figure, path)


if __name__ == "__main__":
    run(main)
