"""The tables of docs/STUDIES.md, which explains them: python scripts/studies/study.py [--price 2]"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, pairwise

import torch
from torch.utils.flop_counter import FlopCounterMode

from dsa_engine.commands.arguments import argument_parser, run
from dsa_engine.commands.planner.demand import Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.devices import DEVICES
from dsa_engine.commands.planner.predict import BEST, OWN, predict_decode, stage_seconds
from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.measure.costs.model_costs import Attended, Served, Shape, Work
from dsa_engine.measure.report import format_table
from dsa_engine.reference import dsa
from dsa_engine.weights.model_folder import model_config
from random_layer import SIZES, Layer, Tokens, positions

LENGTHS, CONTEXTS, BATCHES = (1024, 2048, 4096), (4096, 32768, 131072), (1, 8, 32, 128)


def naive(layer: Layer, tokens: Tokens, chosen: torch.Tensor | None, gathers: bool = False) -> torch.Tensor:
    """``[T, heads, value]`` from keys and values of every head: those that were chosen, or all under a mask."""
    q, rows, *_ = tokens
    (keys, values), number, parts = layer.expand(rows), torch.arange(len(rows), device=q.device), []
    for some in dsa.pieces(len(q), (q.shape[2] * layer.size.topk if gathers else len(keys)) * layer.size.heads):
        of, k, v, closed = "nhd", keys, values, number > positions(tokens)[some, None]
        if chosen is not None and gathers:
            ids, closed = chosen[some].clamp(min=0), chosen[some] < 0
            of, k, v = "tnhd", keys[ids], values[ids]
        elif chosen is not None:
            at = chosen[some].where(chosen[some] >= 0, len(keys))  # -1: in a further column
            closed = closed.new_ones(len(closed), len(keys) + 1).scatter(1, at, False)[:, :-1]
        scores = torch.einsum(f"thd,{of}->thn", q[some], k) * layer.c.softmax_scale
        probabilities = scores.masked_fill(closed[:, None], -math.inf).softmax(-1)
        parts.append(torch.einsum(f"thn,{of}->thd", probabilities, v))
    return torch.cat(parts)


WAYS: dict[str, Callable[[Layer, Tokens, torch.Tensor], torch.Tensor]] = {
    "dense, naive": lambda layer, tokens, _: naive(layer, tokens, None),
    "dense, absorbed": lambda layer, tokens, _: layer.absorbed(tokens, None),
    "sparse, naive with mask": naive,
    "sparse, naive": partial(naive, gathers=True),
    "sparse, absorbed": Layer.absorbed,
    "lightning indexer": lambda layer, tokens, _: layer.select(tokens),
}


def operations(way: str, layer: Layer, queries: int, tokens: int) -> float:
    """Of all products as plain PyTorch runs them, masked pairs included: equally many for each query."""
    counts = []
    for last in (1, 2):
        chosen = torch.empty(last, layer.size.topk, dtype=torch.int64, device="meta")
        with FlopCounterMode(display=False) as counter:
            WAYS[way](layer, layer.tokens(tokens, last), chosen)
        counts.append(counter.get_total_flops())
    return counts[0] + (queries - 1) * (counts[1] - counts[0])


def modelled(placed: Placed, form: str, queries: int, before: int, requests: int = 1) -> dict[str, Work]:
    """Attention and indexer of a layer by the cost model, for ``queries`` after ``before`` tokens of each request."""
    rows = Attended.of([Segment(0, queries, 0, before)] * requests)
    shape = Shape(**(dict.fromkeys(("mha", "dense", "sparse"), Attended()) | {form: rows}), logits=0)
    stages = placed.costs.layer("sparse", "full", shape, Served(0, 0))
    return {name: stages[name] for name in ("sparse flash attention", "lightning indexer")}


def crossing(placed: Placed, decodes: bool, cost: Callable[[str, Work, bool], float]) -> str:
    """From how many tokens on sparse attention with its indexer costs less than dense attention."""
    for n in range(2112, 2**18, 64):
        forms, rows = ("sparse", "dense" if decodes else "mha"), (1, n - 1) if decodes else (n, 0)
        sparse, dense = (sum(cost(*one, decodes) for one in modelled(placed, form, *rows).items()) for form in forms)
        if sparse < dense:
            return f"{n:,}"
    return "never"


def rough(values: Iterable[float]) -> str:
    return "-".join(f"{float(f'{value:.2g}'):.4g}" for value in values) or "no room"


def counted(price: float) -> Iterator[str]:
    """Tables that are the same on every machine; of devices: 64 H200."""
    layer = Layer(SIZES["v3.2"], torch.bfloat16, "meta")
    size, config, contexts = layer.size, model_config("deepseek_v32", {}), [f"{n // 1024}K" for n in CONTEXTS]
    placed = [Placed(config, DEVICES["H200"], Deployment(64, 64, cache="fp8", drafts=number)) for number in range(4)]
    heads, latent = 2 * size.heads * (size.nope + size.rope + size.value), 2 * (size.kv_rank + size.rope)
    read = dict(zip(WAYS, (heads, latent, heads, size.topk * heads, size.topk * latent, 2 * size.index_dim)))
    products = {way: [operations(way, layer, n, n) / 1e12 for n in CONTEXTS] for way in WAYS}
    rows = [[way, *products[way], *(n * each / 1e9 for n in CONTEXTS)] for way, each in read.items()]
    yield format_table(["prefill", *(f"{n} {unit}" for unit in ("TFLOP", "GB") for n in contexts)], rows)
    costs: dict[str, Callable[..., float]] = {"modelled time": partial(stage_seconds, placed[0], OWN)}
    costs |= {"operations": lambda _, work, __: work.flops, "bytes": lambda _, work, __: work.bytes_read}
    rows = [[name, *(crossing(placed[0], decodes, cost) for decodes in (False, True))] for name, cost in costs.items()]
    yield format_table(("sparse is less from", "prefill", "decode"), rows)
    rows, names = [], ("MLA, all tokens", "MLA, selected", "indexer")
    for name, form, stage in zip(names, ("dense", "sparse", "sparse"), (0, 0, 1)):
        work = [[*modelled(placed[0], form, 1 + drafts, 2**16, 4).values()][stage] for drafts in (0, 1)]
        rows.append([name, *(one.flops / 1e9 for one in work), *(one.bytes_read / 1e6 for one in work)])
    yield format_table(("4 x 64K", "GFLOP", "1 draft", "MB", "1 draft"), rows)
    per = [(operations(way, layer, 1, 8192) - operations(way, layer, 1, 4096)) / 4096e6 for way in WAYS]
    forms = [("keys and values", heads, heads / 1e6), ("latent, decompressed", latent, per[0])]
    forms += [("latent, absorbed", latent, per[1]), ("FP8, with index keys", placed[0].token_bytes // 61, per[1])]
    rows = [[name, *of, *(int(placed[0].cache_room(128) // (61 * of[0] * n)) for n in CONTEXTS)] for name, *of in forms]
    yield format_table(("cache", "bytes", "MFLOP", *contexts), rows)

    def rates(context: int, batch: int, drafts: int = 0, accepted: float = 0.0) -> list[float]:
        demand = Demand(64, context, 1, acceptance=(accepted, accepted**2, accepted**3))
        times = [predict_decode(placed[drafts], 64 * batch, demand, kernels) for kernels in (OWN, BEST)]
        return [batch / one.seconds for one in times if one.room >= 0]

    for unit, of in ("tokens/s", lambda rate: rate), ("$", lambda rate: price / 0.0036 / rate):
        rows = [[name, *(rough(map(of, rates(n, batch))) for batch in BATCHES)] for n, name in zip(CONTEXTS, contexts)]
        yield format_table((unit, *map(str, BATCHES)), rows)
    rows = [[f"{p:.0%}", *(rough(rates(65536, 16, drafts, p)) for drafts in range(4))] for p in (0.7, 0.8, 0.9)]
    yield format_table(("accepted", *(f"{drafts} drafts" for drafts in range(4))), rows)


def measured() -> Iterator[str]:
    """Milliseconds of this thread's processor time: prefills of a small layer; a query of V3.2's, over 4K."""
    small, large = (Layer(SIZES[name], torch.float32, "cpu") for name in ("small", "v3.2"))
    runs = [(small, small.tokens(n)) for n in LENGTHS] + [(large, large.tokens(4096, 1))]
    chosen, table = [layer.select(tokens) for layer, tokens in runs], []
    for way, compute in WAYS.items():
        times = [time.thread_time()]
        for run_, ids in zip(runs, chosen):
            compute(*run_, ids)
            times.append(time.thread_time())
        table.append([way, *(1e3 * (end - begin) for begin, end in pairwise(times))])
    yield format_table(("ms", *(f"{n // 1024}K" for n in LENGTHS), "V3.2"), table)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--price", type=float, default=2.0, help="dollars of a device hour (default: 2)")
    torch.set_num_threads(1)
    for table in chain(counted(parser.parse_args().price), measured()):
        print(f"{table}\n")


if __name__ == "__main__":
    run(main)
