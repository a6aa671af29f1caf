"""Command-line options that the scripts and the ``dsa-engine`` command share, and how they end on an error."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from dsa_engine.llm import LLM
from dsa_engine.measure.plots import load_pyplot
from dsa_engine.options import LoadFormat
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.config import CpLayout, MoeDispatch
from dsa_engine.parallel.failure import report_failures


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of :class:`dsa_engine.LLM`; :func:`llm_from` reads them."""
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default="demo", help="a Hugging Face model folder, or 'demo' (default)")
    group.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    group.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    group.add_argument("--load-format", default="auto", choices=get_args(LoadFormat), help="dummy: random weights")
    group.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    group.add_argument("--max-model-len", type=int, help="default: the model's")
    group.add_argument("--max-num-seqs", type=int, default=64)
    group.add_argument("--max-num-batched-tokens", type=int, default=8192, help="prefill chunk per rank")
    group.add_argument(
        "--max-prefill-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="most prefill steps while some request decodes, in (0, 1]; 1: prefill first",
    )
    group.add_argument("--page-size", type=int, default=64, help="tokens per cache page")
    group.add_argument("--cache-memory", metavar="SIZE", help="of each rank's caches, e.g. 4GiB; default: what is free")
    group.add_argument("--workspace", metavar="SIZE", help="for score tiles; default: 1GiB on CUDA, 256MiB on a CPU")
    group.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs in decode")
    group.add_argument(
        "--no-async-scheduling", action="store_true", help="read a step's tokens before the next one is launched"
    )
    group.add_argument(
        "--no-overlap-shared-expert", action="store_true", help="run the shared expert in order, not beside dispatch"
    )
    group.add_argument(
        "--no-overlap-indexer", action="store_true", help="run the indexer's prolog in order, not beside MLA's"
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--no-progress", action="store_true", help="no progress bars")
    group = parser.add_argument_group("parallel (under torchrun)")
    group.add_argument("--cp-size", type=int, help="ranks that prefill a sequence together; default: all")
    group.add_argument("--tp-size", type=int, default=1, help="neighbours that share embedding, o_proj and LM head")
    group.add_argument(
        "--moe-dispatch", default="all_to_all", choices=get_args(MoeDispatch), help="of tokens to experts in prefill"
    )
    group.add_argument(
        "--decode-dispatch", default="all_gather", choices=get_args(MoeDispatch), help="the same in decode"
    )
    group.add_argument("--cp-layout", default="head_tail", choices=get_args(CpLayout))
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a collective")


def parallel_from(args: argparse.Namespace, **changes: Any) -> ParallelConfig:
    """The :class:`ParallelConfig` that the options describe; ``changes`` add to them."""
    return ParallelConfig(
        cp_size=args.cp_size,
        tp_size=args.tp_size,
        moe_dispatch=args.moe_dispatch,
        decode_dispatch=args.decode_dispatch,
        cp_layout=args.cp_layout,
        timeout=args.timeout,
        **changes,
    )


def llm_from(args: argparse.Namespace, **changes: Any) -> LLM:
    """The :class:`LLM` that the options describe; ``changes`` replace options."""
    options = {
        "dtype": args.dtype,
        "device": args.device,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.max_num_seqs,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_prefill_share": args.max_prefill_share,
        "page_size": args.page_size,
        "cache_memory": args.cache_memory,
        "workspace": args.workspace,
        "load_format": args.load_format,
        "hf_overrides": json_object(args.hf_overrides, "--hf-overrides"),
        "seed": args.seed,
        "progress": not args.no_progress,
        "enforce_eager": args.enforce_eager,
        "async_scheduling": not args.no_async_scheduling,
        "overlap_shared_expert": not args.no_overlap_shared_expert,
        "overlap_indexer": not args.no_overlap_indexer,
        "parallel": parallel_from(args),
    }
    return LLM(args.model, **(options | changes))


def reported(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a run as its report keeps them: those that have a value, and not where results were written."""
    written = ("json", "plot", "profile", "dump_logits")
    return {name: value for name, value in vars(args).items() if value is not None and name not in written}


def lengths(text: str) -> list[int]:
    """ "8192,32768" as numbers of tokens."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise argparse.ArgumentTypeError(f"give positive numbers separated by commas, such as 8192,32768, not {text!r}")
    return values


def json_object(text: str, option: str) -> dict[str, Any]:
    """A JSON object given on the command line; ``ValueError`` names the option."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f'{option} is not valid JSON ({error}): {text!r}; give such as {{"num_hidden_layers": 4}}'
        ) from error
    if not isinstance(value, dict):
        raise ValueError(f'{option} must be a JSON object such as {{"num_hidden_layers": 4}}, not {text!r}')
    return value


def read_text(path: str) -> str:
    """The text of a file; ``ValueError`` where it is empty."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    if not text:
        raise ValueError(f"the file {path} is empty; give one with a text")
    return text


def check_outputs(*paths: str | None, plot: str | None = None) -> None:
    """Says before anything is measured, not after, that an output path has no folder or a plot cannot be drawn.

    Raises:
        ValueError: what is missing.
    """
    if plot is not None:
        load_pyplot()
        if Path(plot).suffix.lower() != ".png":
            raise ValueError(f"cannot draw {plot}: plots are PNG files; give a name that ends in .png")
    for path in (*paths, plot):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")
        if path is not None and Path(path).is_dir():
            raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")


def run(main: Callable[[], None]) -> None:
    """Runs a script; an error that a user can mend ends it with one line and exit status 2, not with a traceback."""
    mendable = (ValueError, TypeError, OSError)
    report_failures(brief=mendable)
    try:
        main()
    except (*mendable, KeyboardInterrupt) as error:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise  # one line for the whole run, see parallel/failure.py
        interrupted = isinstance(error, KeyboardInterrupt)
        print("interrupted" if interrupted else f"error: {error}", file=sys.stderr)
        sys.exit(130 if interrupted else 2)
