"""The ``dsa-engine`` command: generate text, and say what a model needs."""

from __future__ import annotations

import argparse
import math
import sys

import torch

from dsa_engine.arguments import (
    Parser,
    add_engine_arguments,
    check_outputs,
    json_object,
    llm_from,
    read_text,
    run,
)
from dsa_engine.checkpoint import parameter_counts
from dsa_engine.engine.memory import available_bytes
from dsa_engine.llm import resolve_model
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.sizes import format_bytes, parse_bytes
from dsa_engine.version import __version__


def main(argv: list[str] | None = None) -> None:
    """Entry point of the installed command."""
    args = _parser().parse_args(argv)
    run(lambda: args.command(args))


def _parser() -> Parser:
    parser = Parser(prog="dsa-engine", description=__doc__)
    parser.add_argument("--version", action="version", version=f"dsa_engine {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="generate from a prompt and print the text as it comes")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="the text to go on from; '-' reads it from standard input")
    prompt.add_argument("--prompt-file", metavar="PATH", help="a file with the text to go on from")
    generate.add_argument("--chat", action="store_true", help="send the prompt through the model's chat template")
    generate.add_argument("--max-tokens", type=int, default=128, help="most tokens to generate")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 (default): the most likely token")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens of this probability together"
    )
    generate.add_argument("--top-k", type=int, default=0, help="keep this many of the likeliest tokens; 0: all")
    generate.add_argument(
        "--min-p", type=float, default=0.0, help="keep tokens of at least this fraction of the highest probability"
    )
    add_engine_arguments(generate)
    generate.set_defaults(command=_generate)

    info = commands.add_parser(
        "info",
        help="parameters, bytes per dtype, cache bytes per token, and what fits",
    )
    info.add_argument("model", metavar="MODEL", help="a Hugging Face model folder (config.json is enough), or 'demo'")
    info.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    info.add_argument("--memory", metavar="SIZE", help="of one rank, e.g. 141GB; default: what this machine has")
    info.add_argument("--ranks", type=int, default=1, help="ranks over which the experts are divided")
    info.add_argument("--json", metavar="PATH", help="write the figures here too")
    info.set_defaults(command=_info)
    return parser


def _generate(args: argparse.Namespace) -> None:
    if args.prompt_file:
        text = read_text(args.prompt_file)
    else:
        text = sys.stdin.read() if args.prompt == "-" else args.prompt
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    llm = llm_from(args)
    prompt = llm.tokenizer.chat([{"role": "user", "content": text}]) if args.chat else text
    for piece in llm.stream(prompt, params):
        if llm.engine.mesh.rank == 0:
            print(piece, end="", flush=True)
    if llm.engine.mesh.rank == 0:
        print()
        if piece.error:
            print(f"error: {piece.error}", file=sys.stderr)
    if piece.error:
        sys.exit(1)


def _info(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, not {args.ranks}")
    config = ModelConfig.from_pretrained(resolve_model(args.model), json_object(args.hf_overrides, "--hf-overrides"))
    if args.ranks > config.n_routed_experts:
        raise ValueError(f"--ranks {args.ranks} is more than the {config.n_routed_experts} routed experts")
    counts = parameter_counts(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.memory:
        memory = parse_bytes(args.memory, "--memory")
    else:
        memory = torch.cuda.mem_get_info()[1] if device.type == "cuda" else available_bytes()
    # Parameters that other ranks hold, seen from a rank that has most experts.
    experts = config.n_routed_experts - math.ceil(config.n_routed_experts / args.ranks)
    expert = 3 * config.moe_intermediate_size * config.hidden_size
    elsewhere = config.mlp_layer_types.count("sparse") * experts * expert
    rows = []
    for name, dtype, total in (
        ("float8_e4m3fn", torch.float8_e4m3fn, counts.bytes_fp8),
        ("bfloat16", torch.bfloat16, counts.bytes_bfloat16),
        ("float32", torch.float32, counts.bytes_float32),
    ):
        weights = total - elsewhere * dtype.itemsize
        try:
            per_token = cache_bytes_per_token(config, cache_format(config, dtype))
        except ValueError:  # no FP8 format for the model's sizes
            per_token = None
        tokens = max(0, memory - weights) // per_token if per_token else None
        rows.append(
            {"dtype": name, "weight_bytes": weights, "cache_bytes_per_token": per_token, "tokens_that_fit": tokens}
        )
    print(
        f"{args.model}: {config.model_type}, {config.num_hidden_layers} layers, {counts.total:,} parameters, "
        f"{counts.active:,} active per token"
        + (f", and {counts.mtp:,} in the MTP module" if counts.mtp else "")
        + f"\non each of {args.ranks} rank(s) with {format_bytes(memory)}, activations not counted:\n"
    )
    table = []
    for r in rows:
        per_token, tokens = r["cache_bytes_per_token"], r["tokens_that_fit"]
        cached = ("no such format", "-") if per_token is None else (f"{per_token:,} B", f"{tokens:,}")
        table.append((r["dtype"], format_bytes(r["weight_bytes"]), *cached))
    print(format_table(("dtype", "weights per rank", "cache per token", "cached tokens that fit"), table))
    print("\nfloat8_e4m3fn: as it is stored; this version expands FP8 weights on load and caches in the run's dtype")
    if args.json:
        result = {"model_type": config.model_type, "parameters": counts.total, "active_parameters": counts.active}
        result |= {"mtp_parameters": counts.mtp, "ranks": args.ranks, "memory_bytes": memory, "per_dtype": rows}
        write_json(args.json, result)


if __name__ == "__main__":
    main()
