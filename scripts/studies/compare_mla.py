"""Forms of Multi-head Latent Attention in decode: cached bytes, operations and time of each.

Cache decompressed (CD) and compressed (CC), W_UK and W_UV absorbed (A_CC), without copying the cache rows together
(A_CC_ME), weights multiplied beforehand (AM_CC_ME), and the engine's kernel: one layer, one new token per sequence, the
same weights. All outputs are compared before anything is timed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from mla_forms import FORMS, PAGE_SIZE, SIZES, Cache, EngineForm, MLAForm, MLASize, MLAWeights


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="v3.2", help="whose attention")
    parser.add_argument("--context", type=lengths, default=[512, 2048], help="cached tokens of a sequence")
    parser.add_argument("--batch-size", type=lengths, default=[1, 4], help="sequences at once")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add_json_argument(parser)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse()
    check_outputs(args.json)
    device = torch.device(args.device)
    dtype, max_error = (torch.bfloat16, 5e-2) if device.type == "cuda" else (torch.float32, 1e-4)
    counts = {form.name: count(form, SIZES[args.size]) for form in FORMS}
    header = ("form", "cache kB a token", "MFLOP a cached token", "weights read")
    rows: list[tuple[Any, ...]] = [
        (name, f"{c.cache_bytes / 1e3:.3f}", f"{c.flops / 1e6:.2f}", format_bytes(c.weight_bytes))
        for name, c in counts.items()
    ]
    print("Counted, one layer, bfloat16:\n\n" + format_table(header, rows))
    weights = MLAWeights.random(SIZES[args.size], dtype, device)
    forms = [form(weights) for form in FORMS]
    results = []
    for batch in args.batch_size:
        for context in args.context:
            seconds, errors = measure(forms, batch, context, args.repeat, max_error)
            engine = statistics.median(seconds["engine"])
            rows = []
            for name, times in seconds.items():
                ms, ratio = statistics.median(times) * 1e3, statistics.median(times) / engine
                rows.append((name, ms, f"{ratio:.2f}", f"{errors[name]:.1e}"))
                about = {"form": name, "batch_size": batch, "context": context, "relative_error": errors[name]}
                results.append(about | {"seconds": times, "ratio_to_engine": ratio})
            print(f"\nMeasured, batch {batch}, {context:,} cached tokens each:\n")
            print(format_table(("form", "median ms", "/ engine", "difference to CD"), rows))
    if args.json:
        about = environment(device, dtype, 1) | {"options": reported(args)}
        write_json(args.json, about | {"counted": {n: c._asdict() for n, c in counts.items()}, "results": results})


class Counts(NamedTuple):
    """One step of a form in bfloat16: cached bytes and operations per cached token, and bytes of weights."""

    cache_bytes: float
    flops: float
    weight_bytes: int


def count(form: type[MLAForm], size: MLASize) -> Counts:
    """Counted from the products and tensors of two steps with different contexts."""
    device = "cpu" if form is EngineForm else "meta"  # the kernel's loops need values of sizes, the others only shapes
    made = form(MLAWeights.random(size, torch.bfloat16, device))
    counted = []
    for tokens in (PAGE_SIZE, 2 * PAGE_SIZE):
        shapes = ((1, tokens, size.kv_rank), (1, tokens, size.rope), (1, size.q_rank))
        latent, rotated, q = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        angles = torch.zeros(1, size.rope // 2, device=device)
        cache = made.cache(latent, rotated)
        with FlopCounterMode(display=False) as counter:
            made.decode(q, angles, angles, cache)
        counted.append((cache_bytes(cache), counter.get_total_flops()))
    per_token = [(more - few) / PAGE_SIZE for few, more in zip(*counted, strict=True)]
    return Counts(per_token[0], per_token[1], sum(weight.nbytes for weight in made.weights))


def cache_bytes(cache: Cache) -> int:
    """Bytes of the rows in a form's cache; block tables are not counted."""
    return sum(part.nbytes for part in cache if isinstance(part, torch.Tensor) and part.is_floating_point())


def measure(
    forms: list[MLAForm], batch: int, context: int, repeat: int, max_error: float
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of every form's runs, which take turns, and the difference of its output to the first form's.

    Raises:
        RuntimeError: outputs differ by more than ``max_error``, relative; then nothing is timed.
    """
    size, like = forms[0].size, forms[0].qr
    shapes = ((batch, context, size.kv_rank), (batch, context, size.rope), (batch, size.q_rank))
    latent, rotated, q = (torch.randn(shape, dtype=like.dtype, device=like.device) for shape in shapes)
    angle = torch.arange(size.rope // 2, device=like.device).float().expand(batch, -1)
    caches = {form.name: form.cache(latent, rotated) for form in forms}
    seconds: dict[str, list[float]] = {form.name: [] for form in forms}
    outputs: dict[str, torch.Tensor] = {}
    errors: dict[str, float] = {}
    for number in range(repeat + 1):
        for form in forms:
            begin = time.perf_counter()
            out = form.decode(q, angle.cos(), angle.sin(), caches[form.name])
            if like.is_cuda:
                torch.cuda.synchronize()
            if number:
                seconds[form.name].append(time.perf_counter() - begin)
            else:
                outputs[form.name] = out.double()
        if not number:
            expected = outputs[forms[0].name]
            errors = {name: float((out - expected).norm() / expected.norm()) for name, out in outputs.items()}
            if bad := [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= max_error]:
                raise RuntimeError(f"these differ from {forms[0].name}: {', '.join(bad)}; not timed")
    return seconds, errors


if __name__ == "__main__":
    run(main)
