"""``dsa-engine check MODEL``: a checkpoint, as the engine serves it, beside ``reference/dsa.py``."""

from __future__ import annotations

import argparse
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dsa_engine.commands.arguments import add_engine_arguments, add_json_argument, engine_options, read_text, reported
from dsa_engine.system.output_files import check_outputs

if TYPE_CHECKING:
    from dsa_engine.commands.doctor.checks import Finding
    from dsa_engine.config.model import ModelConfig
    from dsa_engine.engine.engine import Engine
    from dsa_engine.text.tokenizer import Tokenizer

_TOKENS_ON_CPU = 1024


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
    """Prints a line per finding; exit status 1 if one is wrong."""
    from dsa_engine.commands.check.checks import findings
    from dsa_engine.commands.doctor.command import show_all
    from dsa_engine.engine.startup.start import start
    from dsa_engine.measure.report import run_report
    from dsa_engine.options import EngineOptions
    from dsa_engine.parallel.failure import report_failures
    from dsa_engine.text.tokenizer import Tokenizer
    from dsa_engine.weights.model_folder import resolve_model

    check_outputs(args.json)
    report_failures()
    args.model = args.model_tag or args.model
    if args.load_format == "dummy" or args.prefill_ranks:
        raise ValueError("check needs a checkpoint, and ranks that do all: no load_format 'dummy', no prefill_ranks")
    options = EngineOptions(**(engine_options(args) | {"enforce_eager": True, "enable_dbo": False}))
    folder = resolve_model(options.model)
    engine = start(folder, options)[0]
    layers, tokens = _layers(engine.config, args.layers), _tokens(engine, args.tokens)
    tokenizer = Tokenizer(folder, options.trust_remote_code) if Tokenizer.lies_in(folder) else None
    ids = text_ids(tokenizer, engine.config.vocab_size, args.text_file, tokens)
    about = run_report(engine, reported(args), engine.mesh.world_size)

    def compared() -> Iterator[Finding]:
        agreements = yield from findings(engine, folder, ids, tokenizer is not None, layers)
        about["agreements"] = [asdict(one) for one in agreements]

    try:
        show_all(compared(), args.json, about, engine.mesh.is_leader, width=10)
    finally:
        if engine.cache_steps is not None:
            engine.cache_steps.close()


def _tokens(engine: Engine, wanted: int | None) -> int:
    limit = min(engine.max_model_len, engine.scheduler.capacity.limit * engine.cache.page_size)
    if wanted is None:
        on_cpu = max(_TOKENS_ON_CPU, 2 * engine.config.index_topk)
        return limit if engine.mesh.device.type == "cuda" else min(limit, on_cpu)
    if not 16 <= wanted <= limit:
        raise ValueError(f"--tokens {wanted} is not possible: 16 to {limit}, by max_model_len and cache_memory")
    return wanted


def _layers(config: ModelConfig, wanted: str) -> list[int]:
    from dsa_engine.model.rank_weights import layers_of_each_kind

    count = config.num_hidden_layers
    known = {"all": list(range(count)), "few": sorted({*layers_of_each_kind(config), count - 1})}
    if wanted in known:
        return known[wanted]
    if not all(part.isdecimal() and int(part) < count for part in wanted.split(",")):
        raise ValueError(f"--layers {wanted!r} is not possible: few, all, or numbers from 0 to {count - 1}")
    return sorted({int(part) for part in wanted.split(",")})


def text_ids(tokenizer: Tokenizer | None, vocab_size: int, path: str | None, tokens: int) -> list[int]:
    """Token ids of a text; without a tokenizer random ones."""
    if tokenizer is None:
        return random.Random(0).choices(range(2, vocab_size), k=tokens)
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path] if path else [str(one) for one in sources if one.stat().st_size]
    ids: list[int] = []
    for text in texts:
        ids += tokenizer.encode(read_text(text), add_special_tokens=not ids)
        if len(ids) >= tokens:
            return ids[:tokens]
    raise ValueError(f"the text has {len(ids)} tokens of the {tokens} to check; give a longer one, or lower --tokens")
