"""``dsa-engine check MODEL``: a checkpoint, as the engine serves it, beside ``reference/dsa.py``."""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_engine.commands.arguments import add_engine_arguments, add_json_argument, engine_options, read_text, reported
from dsa_engine.system.output_files import check_outputs

if TYPE_CHECKING:
    from dsa_engine.commands.check.layer import Agreement
    from dsa_engine.commands.doctor.checks import Finding
    from dsa_engine.llm import LLM

_TOKENS_ON_CPU = 1024
_COLUMNS: tuple[tuple[str, Callable[[list[float]], float], str], ...] = (
    *((name, max, ".1e") for name in ("attention", "feed_forward")),
    *((name, min, ".1%") for name in ("selection", "mass", "random", "recent", "experts")),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    few = "few: one of each kind, and the last; all; or their numbers"
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="as --model takes it (default: demo)")
    parser.add_argument("--layers", default="few", metavar="N,N,…", help=few)
    longest = f"the longest context; default: max_model_len, on a CPU at most {_TOKENS_ON_CPU}"
    parser.add_argument("--tokens", type=int, help=longest)
    parser.add_argument("--text-file", metavar="PATH", help="a text like those of training; default: Python's sources")
    add_json_argument(parser)
    add_engine_arguments(parser)


def run_check(args: argparse.Namespace) -> None:
    """Prints a line per finding, and a table of all layers; exit status 1 if one is wrong."""
    from dsa_engine.commands.check.checks import findings
    from dsa_engine.commands.doctor.command import show_all
    from dsa_engine.llm import LLM
    from dsa_engine.measure.report import format_table, run_report

    check_outputs(args.json)
    args.model = args.model_tag or args.model
    if args.load_format == "dummy" or args.prefill_ranks:
        raise ValueError("check needs a checkpoint, and ranks that do all: no load_format 'dummy', no prefill_ranks")
    with LLM(**(engine_options(args) | {"enforce_eager": True, "enable_dbo": False})) as llm:
        llm.wait_idle()
        mesh, tokens, layers = llm.engine.mesh, _tokens(llm, args.tokens), _layers(llm, args.layers)
        about = run_report(llm, reported(args), mesh.world_size)

        def compared() -> Iterator[Finding]:
            agreements = yield from findings(llm, *text_ids(llm, args.text_file, tokens), layers)
            about["agreements"] = [asdict(one) for one in agreements]
            if mesh.is_leader:
                header = ("layer", *(name for name, _, _ in _COLUMNS))
                print(f"\n{format_table(header, [_row(layer, agreements) for layer in layers])}")

        show_all(compared(), args.json, about, mesh.is_leader, width=16)


def _row(layer: int, agreements: list[Agreement]) -> tuple[str, ...]:
    """A layer's line of the table: its worst numbers of all cases."""
    cells = [str(layer)]
    for name, worst, how in _COLUMNS:
        known = [getattr(one, name) for one in agreements if one.layer == layer and getattr(one, name) is not None]
        cells.append(format(worst(known), how) if known else "-")
    return tuple(cells)


def _tokens(llm: LLM, wanted: int | None) -> int:
    engine = llm.engine
    limit = min(engine.max_model_len, engine.scheduler.capacity.limit * engine.cache.page_size)
    if wanted is None:
        on_cpu = max(_TOKENS_ON_CPU, 2 * engine.config.index_topk)
        return limit if engine.mesh.device.type == "cuda" else min(limit, on_cpu)
    if not 16 <= wanted <= limit:
        raise ValueError(f"--tokens {wanted} is not possible: 16 to {limit}, by max_model_len and cache_memory")
    return wanted


def _layers(llm: LLM, wanted: str) -> list[int]:
    from dsa_engine.model.rank_weights import layers_of_each_kind

    count = llm.engine.config.num_hidden_layers
    known = {"all": list(range(count)), "few": sorted({*layers_of_each_kind(llm.engine.config), count - 1})}
    if wanted in known:
        return known[wanted]
    if not all(part.isdecimal() and int(part) < count for part in wanted.split(",")):
        raise ValueError(f"--layers {wanted!r} is not possible: few, all, or numbers from 0 to {count - 1}")
    return sorted({int(part) for part in wanted.split(",")})


def text_ids(llm: LLM, path: str | None, tokens: int) -> tuple[list[int], bool]:
    """Token ids of a text, and whether it is one: a model without a tokenizer gets random tokens."""
    if not llm.has_tokenizer:
        return random.Random(0).choices(range(2, llm.engine.config.vocab_size), k=tokens), False
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path] if path else [str(one) for one in sources if one.stat().st_size]
    ids: list[int] = []
    for text in texts:
        ids += llm.tokenizer.encode(read_text(text), add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens], True
    raise ValueError(f"the text has {len(ids)} tokens of the {tokens} to check; give a longer one, or lower --tokens")
