"""``dsa-engine info``: what a model needs, from its config.json alone."""

from __future__ import annotations

import argparse
import math
from contextlib import suppress

import torch

from dsa_engine.arguments import json_object
from dsa_engine.checkpoint import parameter_counts
from dsa_engine.checkpoint.schemes import stored_bytes
from dsa_engine.engine.memory import available_bytes
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_format
from dsa_engine.model_folder import resolve_model
from dsa_engine.output_files import check_outputs
from dsa_engine.sizes import format_bytes, parse_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face model folder (config.json is enough), or 'demo'")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    parser.add_argument("--memory", metavar="SIZE", help="of one rank, e.g. 141GB; default: what this machine has")
    parser.add_argument("--ranks", type=int, default=1, help="ranks over which the experts are divided")
    parser.add_argument("--json", metavar="PATH", help="write the figures here too; '-': to standard output")


def run_info(args: argparse.Namespace) -> None:
    """Prints what the weights take in each dtype, and how many cached tokens fit beside them.

    Raises:
        ValueError, OSError: an option or the configuration is not possible.
    """
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
    stored = [
        ("float8_e4m3fn", torch.float8_e4m3fn, counts.bytes_fp8 - elsewhere),
        ("bfloat16", torch.bfloat16, counts.bytes_bfloat16 - elsewhere * 2),
        ("float32", torch.float32, counts.bytes_float32 - elsewhere * 4),
    ]
    for name in ("int8", "int4-experts"):
        with suppress(ValueError):  # sizes that groups of 128 do not divide
            stored.append((name, torch.bfloat16, stored_bytes(config, name, config.n_routed_experts - experts)))
    rows = []
    for name, dtype, weights in stored:
        per_token, in_fp8 = (_cache_bytes(config, cached) for cached in (dtype, torch.float8_e4m3fn))
        row = {"dtype": name, "weight_bytes": weights, "cache_bytes_per_token": per_token}
        for key, each in (("tokens_that_fit", per_token), ("tokens_that_fit_in_fp8_caches", in_fp8)):
            row[key] = max(0, memory - weights) // each if each else None
        rows.append(row)
    if args.json:
        result = {"model_type": config.model_type, "parameters": counts.total, "active_parameters": counts.active}
        result |= {"mtp_parameters": counts.mtp, "ranks": args.ranks, "memory_bytes": memory, "per_dtype": rows}
        write_json(args.json, result)
    print(
        f"{args.model}: {config.model_type}, {config.num_hidden_layers} layers, {counts.total:,} parameters, "
        f"{counts.active:,} active per token"
        + (f", and {counts.mtp:,} in the MTP module" if counts.mtp else "")
        + f"\non each of {args.ranks} rank(s) with {format_bytes(memory)}, activations not counted:\n"
    )
    table = []
    for r in rows:
        per_token, tokens = r["cache_bytes_per_token"], r["tokens_that_fit"]
        cached = ["no such format", "-"] if per_token is None else [f"{per_token:,} B", f"{tokens:,}"]
        in_fp8 = r["tokens_that_fit_in_fp8_caches"]
        cached.append("-" if in_fp8 is None else f"{in_fp8:,}")
        table.append((r["dtype"], format_bytes(r["weight_bytes"]), *cached))
    columns = ("dtype", "weights per rank", "cache per token", "cached tokens that fit", "with kv_cache_dtype fp8")
    print(format_table(columns, table))
    print("\nfloat8_e4m3fn: as it is stored; this version expands FP8 weights on load")
    print("int8, int4-experts: what convert_checkpoint.py --quantize writes, with caches in bfloat16")


def _cache_bytes(config: ModelConfig, dtype: torch.dtype) -> int | None:
    """Of a token; None where the model's sizes have no FP8 format."""
    try:
        return cache_bytes_per_token(config, cache_format(config, dtype))
    except ValueError:
        return None
