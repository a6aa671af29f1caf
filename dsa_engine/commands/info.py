"""``dsa-engine info``: memory that a model needs, from its config.json alone."""

from __future__ import annotations

import argparse
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from dsa_engine.commands.arguments import json_object
from dsa_engine.config.released import RELEASED_CONFIGS, released_fp8
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import available_bytes, format_bytes, parse_bytes

if TYPE_CHECKING:
    from dsa_engine.config.model import ModelConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(RELEASED_CONFIGS)
    parser.add_argument("model", metavar="MODEL", help=f"a folder, a hub id, 'demo', or one of {names}")
    parser.add_argument("--hf-overrides", default="{}", metavar="JSON", help="keys that replace those of config.json")
    parser.add_argument("--memory", metavar="SIZE", help="memory of one rank, e.g. 141GB; default: this machine's")
    parser.add_argument("--ranks", type=int, default=1, help="ranks over which the experts are divided")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that divide embedding, o_proj and LM head")
    parser.add_argument("--dcp-size", type=int, default=1, help="ranks that hold the cache of a request together")
    parser.add_argument("--json", metavar="PATH", help="write the figures here too; '-': to standard output")


def run_info(args: argparse.Namespace) -> None:
    """Prints the bytes of the weights in each format, and the number of cached tokens that fit beside them."""
    import torch

    from dsa_engine.weights.model_folder import model_config

    check_outputs(args.json)
    if args.ranks < 1:
        raise ValueError(f"--ranks must be at least 1, not {args.ranks}")
    if args.dcp_size < 1 or args.ranks % args.dcp_size:
        raise ValueError(f"--dcp-size {args.dcp_size} must divide --ranks {args.ranks}")
    config = model_config(args.model, json_object(args.hf_overrides, "--hf-overrides"))
    if args.ranks > config.n_routed_experts:
        raise ValueError(f"--ranks {args.ranks} is more than the {config.n_routed_experts} routed experts")
    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else available_bytes()
    memory = parse_bytes(args.memory, "--memory") if args.memory else memory
    counted = figures(config, args.ranks, args.tp_size, memory, args.dcp_size)
    if args.json:
        write_json(args.json, counted)
    modules = f"{counted['mtp_modules']} MTP module(s), with their copies of embedding and head, if they hold any"
    mtp = f", and {counted['mtp_parameters']:,} in {modules}" if counted["mtp_parameters"] else ""
    print(
        f"{args.model}: {config.model_type}, {config.num_hidden_layers} layers, {counted['parameters']:,} parameters, "
        f"{counted['active_parameters']:,} active per token{mtp}\n"
        f"on each of {args.ranks} rank(s) with {format_bytes(memory)}, activations not counted:\n"
        + (f"cached tokens are those of {args.dcp_size} ranks together\n" if args.dcp_size > 1 else "")
    )
    table = []
    for name, size, per_token, fit, in_fp8 in (row.values() for row in counted["per_format"]):
        cached = (f"{per_token:,} B", f"{fit:,}", "-" if in_fp8 is None else f"{in_fp8:,}")
        table.append((name, format_bytes(size), *cached))
    columns = ("weights", "per rank", "cache per token", "cached tokens that fit", "with kv_cache_dtype fp8")
    print(format_table(columns, table))
    what = "as the checkpoint stores them" if config.quantization else "if dsa-engine convert made it so"
    print(f"\n{table[0][0]}: {what}; what is never quantised, W_UK and W_UV count in bfloat16")
    if module := counted["bytes_of_an_mtp_module"]:
        each = f"{format_bytes(module['weights'])} of weights and {module['cache_per_token']:,} B a cached token more"
        print(f"each MTP module that drafts (speculative_config) takes {each}, {table[0][0]}")
    print("int8, int4-experts: what dsa-engine convert --quantize makes of it")
    if hot := counted["hot_rows"]:
        print(
            f"with hot_rows a token of a spilled page takes {hot['device_bytes']:,} B on the device and "
            f"{hot['host_bytes']:,} B in host memory, in {hot['caches']} caches; a row of a decode step reads "
            f"{format_bytes(hot['selected_bytes'] / 100)} from there for each 1% of its selection that it lacks"
        )
    for name, exchanges in counted["decode_exchanges"].items():
        total = format_bytes(sum(exchanges.values()))
        parts = ", ".join(f"{what} {size:,.0f} B" for what, size in exchanges.items())
        print(f"a rank sends for a row in decode, in a layer {name}: {total} ({parts})")


def figures(config: ModelConfig, ranks: int, tp_size: int, memory: int, dcp_size: int = 1) -> dict[str, Any]:
    """Parameters and bytes of the rank with the most experts, as ``dsa-engine plan`` counts them too."""
    import torch

    from dsa_engine.engine.cache.sizes import HotBytes
    from dsa_engine.measure.costs.context_exchanges import decode_exchanges
    from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_dtype, cache_format
    from dsa_engine.model.layout import parameter_counts
    from dsa_engine.model.rank_weights import WeightBytes
    from dsa_engine.weights.convert.schemes import stored_as
    from dsa_engine.weights.formats import quantization_name

    stored, counts, bfloat16 = config.quantization or released_fp8(), parameter_counts(config), torch.bfloat16
    forms: list[tuple[str, Any, torch.dtype]] = [(quantization_name(stored) or "as stored", stored, bfloat16)]
    for name in ("int8", "int4-experts"):
        with suppress(ValueError):  # raised for sizes that groups of 128 do not divide
            if name != forms[0][0]:
                forms.append((name, stored_as(name, config), bfloat16))
    forms += [("bfloat16", None, bfloat16), ("float32", None, torch.float32)]
    fp8 = None
    with suppress(ValueError):  # raised for sizes that have no FP8 format
        fp8 = cache_bytes_per_token(config, cache_format(config, cache_dtype("fp8", bfloat16)))
    rows = list[dict[str, Any]]()
    for name, quantization, dtype in forms:
        size = round(WeightBytes.of_rank(config, quantization, dtype, ranks, tp_size).total(config, drafts=False))
        per_token = cache_bytes_per_token(config, cache_format(config, dtype))
        free = max(0, memory - size) * dcp_size
        row = {"weights": name, "weight_bytes": size, "cache_bytes_per_token": per_token}
        row |= {"tokens_that_fit": free // per_token, "tokens_that_fit_in_fp8_caches": free // fp8 if fp8 else None}
        rows.append(row)
    cached_as, kinds = cache_format(config, bfloat16), sorted({*config.indexer_types[: config.num_hidden_layers]})
    exchanges = {
        "with an indexer" if kind == "full" else "without an indexer": {
            one.name: one.sent for one in decode_exchanges(config, cached_as, 1, dcp_size, indexer=kind == "full")
        }
        for kind in kinds * (dcp_size > 1)
    }
    module = None  # what one adds
    if counts.mtp:
        with_one = WeightBytes.of_rank(config, stored, bfloat16, ranks, tp_size).total(config, drafts=True)
        cached = cache_bytes_per_token(config.with_mtp(1), cache_format(config, bfloat16))
        module = {
            "weights": round(with_one) - rows[0]["weight_bytes"],
            "cache_per_token": cached - rows[0]["cache_bytes_per_token"],
        }
    hot = None
    if "none" not in config.indexer_types:
        cached_as = cached_as if fp8 is None else cache_format(config, cache_dtype("fp8", bfloat16))
        of = HotBytes.of(config, cached_as, page_size=1, sets=0, hot_rows=0)
        hot = {"caches": cached_as.name, "device_bytes": of.keys, "host_bytes": of.latent}
        hot["selected_bytes"] = config.index_topk * of.latent
    return {
        "model_type": config.model_type,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "mtp_parameters": counts.mtp,
        "mtp_modules": config.num_nextn_predict_layers,
        "bytes_of_an_mtp_module": module,
        "ranks": ranks,
        "tp_size": tp_size,
        "dcp_size": dcp_size,
        "decode_exchanges": exchanges,
        "hot_rows": hot,
        "memory_bytes": memory,
        "per_format": rows,
    }
