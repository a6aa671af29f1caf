"""Rate at which pages leave for host memory and return, beside plain copies of as many bytes in the same process.

A plain copy moves every pool as a whole. Pages lie side by side, in order or shuffled, or every second one: then no
two are neighbours. All works run in turn; rates are medians.

Example:
    python scripts/bench_page_tiers.py --pages 512
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from dsa_engine.commands.arguments import add_json_argument, argument_parser, run
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.host import HostPages
from dsa_engine.engine.cache.pool import PageCopy, PageMoves
from dsa_engine.engine.cache.transfer import PageTransfer
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.model.kv_cache import KVCache, cache_dtype, cache_format
from dsa_engine.parallel.device import choose_device
from dsa_engine.parallel.group import Group
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from dsa_engine.weights.model_folder import resolve_model


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as of LLM; only its configuration is read")
    parser.add_argument("--pages", type=int, default=512, help="pages that move at once")
    parser.add_argument("--page-size", type=int, default=64, help="tokens of a page")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "bfloat16", "fp8"), help="as of LLM")
    parser.add_argument("--repeat", type=int, default=10, help="runs of each, in turn, after one that is not counted")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add_json_argument(parser)
    args = parser.parse_args()
    if min(args.pages, args.page_size, args.repeat) < 1:
        raise ValueError("--pages, --page-size and --repeat must be at least 1")
    return args


def main() -> None:
    args = parse()
    check_outputs(args.json)
    device = choose_device(args.device)
    config = ModelConfig.from_pretrained(resolve_model(args.model, dummy=True))
    dtype = config.dtype if device.type == "cuda" else torch.float32
    format = cache_format(config, cache_dtype(args.kv_cache_dtype, dtype))
    cache = KVCache(config, format, 2 * args.pages, args.page_size, device)
    host = HostPages(cache, args.pages)
    transfer = PageTransfer(cache, Group((0,), 0, None), host, 0)

    def plain(to_host: bool) -> None:
        for pools, slots in zip(cache.page_words(), host.pools, strict=True):
            for pool, slot in zip(pools, slots, strict=True):
                whole = pool[: args.pages]
                into, source = (slot, whole) if to_host else (whole, slot)
                into.copy_(source, non_blocking=True)

    def paged(copies: list[PageCopy]) -> None:
        transfer.begin(PageMoves(copies))
        transfer.finish()

    in_order = list(range(args.pages))
    shuffled = random.Random(0).sample(in_order, args.pages)
    orders = {"pages in order": in_order, "shuffled": shuffled, "no neighbours": [2 * page for page in shuffled]}
    works: dict[tuple[bool, str], Callable[[], None]] = {}
    for to_host in (False, True):
        works[to_host, "plain copy"] = partial(plain, to_host)
        for name, pages in orders.items():
            copies = [PageCopy(to_host, page, slot) for slot, page in enumerate(pages)]
            works[to_host, name] = partial(paged, copies)
    seconds = measured(works, args.repeat, device)

    results = []
    for (to_host, name), taken in seconds.items():
        median, beside = statistics.median(taken), statistics.median(seconds[to_host, "plain copy"])
        results.append(
            {
                "direction": "to the host" if to_host else "from the host",
                "copy": name,
                "pages_per_s": args.pages / median,
                "bytes_per_s": host.bytes / median,
                "ratio_to_plain_copy": beside / median,
            }
        )
    load = os.getloadavg()[0]
    if args.json:
        report = environment(device, dtype, 1) | {"options": vars(args), "load": load, "results": results}
        write_json(args.json, report)
    print(f"{args.pages} pages of {format_bytes(host.page_bytes)} in all layers; load of the machine {load:.1f}")
    rows = [
        (
            r["direction"],
            r["copy"],
            f"{r['pages_per_s']:,.0f}",
            format_bytes(r["bytes_per_s"]),
            f"{r['ratio_to_plain_copy']:.2f}",
        )
        for r in results
    ]
    print(format_table(("direction", "copy", "pages/s", "bytes/s", "ratio"), rows))


def measured(
    works: dict[tuple[bool, str], Callable[[], None]], repeat: int, device: torch.device
) -> dict[tuple[bool, str], list[float]]:
    """Seconds of every run of each work, in turn."""
    seconds: dict[tuple[bool, str], list[float]] = {key: [] for key in works}
    for number in range(repeat + 1):
        for key, work in works.items():
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begun = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if number:
                seconds[key].append(time.perf_counter() - begun)
    return seconds


if __name__ == "__main__":
    run(main)
