"""Forms of context parallelism compared: bytes sent, work, memory and time of one prefill.

Cache rows by all-gather with tokens head-tail (the engine's way) or contiguous, heads by all-to-all (Ulysses, through
DeepSpeed's sequence layer), and a ring of blocks in two passes: one layer of DSA, the same weights and tokens. All
outputs are compared with those of a single process before anything is timed. Start it on two ranks or more:

    torchrun --nproc-per-node 2 scripts/studies/compare_context_parallel.py
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from context_parallel.forms import Contiguous, HeadTail, Ulysses
from context_parallel.layer import SIZES, Division, Layer
from context_parallel.ring import Ring
from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes

FORMS = {"head-tail": HeadTail, "contiguous": Contiguous, "ulysses": Ulysses, "ring": Ring}

# Relative errors: of all rows together, and of the median row. Rounding sometimes changes the last selected token at a
# near tie, which changes single rows by a hundredth.
MAX_ERRORS = {torch.float32: (1e-3, 1e-5), torch.bfloat16: (5e-2, 5e-2)}


def give_back_free_memory() -> None:
    """Makes the C library return unused memory to the system. On a CPU the memory that a call adds to the resident set
    then does not depend on earlier calls. Without effect if the library is not glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class SentBytes(TorchDispatchMode):
    """Bytes that this rank sends to others within the context, counted where PyTorch dispatches collectives: the
    payload, not what an algorithm sends over a wire."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks, self.total = ranks, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, others = func.name(), self.ranks - 1
        if name == "c10d::_allgather_base_":
            self.total += args[1].nbytes * others
        elif name == "c10d::alltoall_base_":
            self.total += args[1].nbytes // self.ranks * others
        elif name == "c10d::send":
            self.total += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=SIZES, help="size of the layer (default: v3.2 on a GPU, small on a CPU)")
    parser.add_argument("--seq-len", type=lengths, default=[2048, 4096, 8192], help="tokens of the sequence")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="some of them (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    add_json_argument(parser)
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = parse()
    check_outputs(args.json)
    mesh = Mesh.create(ParallelConfig(), args.device, same=lambda: {"options": str(vars(args))})
    if mesh.world_size == 1:
        raise ValueError("one rank has nothing to divide; start several: torchrun --nproc-per-node 2 …")
    cuda = mesh.device.type == "cuda"
    args.size = args.size or ("v3.2" if cuda else "small")
    layer = Layer(SIZES[args.size], torch.bfloat16 if cuda else torch.float32, mesh.device)
    forms = {name: FORMS[name](layer, mesh.world) for name in args.forms}
    results = [result for length in args.seq_len for result in compare(forms, layer, mesh, length, args)]
    if not mesh.is_leader:
        return
    if args.json:
        about = environment(mesh.device, layer.dtype, mesh.world_size)
        write_json(args.json, about | {"options": reported(args), "results": results})
    print(f"One layer of size {args.size}, {mesh.world_size} ranks; values of the slowest rank:\n")
    rows = [
        (
            f"{r['length']:,} {r['form']}",
            statistics.median(r["seconds"]) * 1e3,
            f"{r['ratio']:.2f}",
            format_bytes(r["sent_bytes"]),
            f"{r['imbalance']:.3f}",
            format_bytes(r["added_bytes"]),
            f"{r['relative_error']:.1e}",
        )
        for r in results
    ]
    header = ("tokens, form", "median ms", f"/ {args.forms[0]}", "sends", "imbalance of work", "run adds", "difference")
    print(format_table(header, rows))


def compare(
    forms: dict[str, HeadTail], layer: Layer, mesh: Mesh, length: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Runs every form once for its output, then all in turn for their times; the same results on every rank.

    Raises:
        RuntimeError: an output differs from the single process's; then nothing is timed.
    """

    def of_all(value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=mesh.device)
        return mesh.world.all_gather(mine).tolist()

    def seconds(run: Callable[[], torch.Tensor]) -> float:
        of_all(0.0)  # all ranks begin together
        begin = time.perf_counter()
        run()
        if mesh.device.type == "cuda":
            torch.cuda.synchronize(mesh.device)
        return time.perf_counter() - begin

    whole, results, runs = layer.tokens(length), [], []
    for name, form in forms.items():
        division = Division(length, mesh.world_size, form.layout)
        positions = division.positions[mesh.world.index]
        tokens = whole.at(positions)
        expected = layer.single_process(whole, positions).double()
        give_back_free_memory()
        reset_peak(mesh.device)
        before = peak_bytes(mesh.device)
        with SentBytes(mesh.world_size) as sent:
            out = form.run(division, tokens)
        added = peak_bytes(mesh.device) - before
        difference, norm = ((x.flatten(1)).norm(dim=1) for x in (out.double() - expected, expected))
        errors = [sum(of_all(float(x.square().sum()))) for x in (difference, norm)]
        error, median = (errors[0] / errors[1]) ** 0.5, float((difference / norm).median()) if len(norm) else 0.0
        allowed, allowed_median = MAX_ERRORS[layer.dtype]
        if not (error <= allowed and max(of_all(median)) <= allowed_median):
            raise RuntimeError(f"{name} differs from the single process by {error:.1e} at {length} tokens: not timed")
        work = form.work(division, layer.size)
        results.append(
            {
                "form": name,
                "length": length,
                "seconds": [],
                "sent_bytes": int(max(of_all(sent.total))),
                "imbalance": max(work) * len(work) / sum(work),
                "added_bytes": int(max(of_all(added))),
                "relative_error": error,
            }
        )
        runs.append(lambda form=form, division=division, tokens=tokens: form.run(division, tokens))
    for _ in range(args.repeat):
        for result, run_form in zip(results, runs, strict=True):
            result["seconds"].append(max(of_all(seconds(run_form))))
    for result in results:
        result["ratio"] = statistics.median(result["seconds"]) / statistics.median(results[0]["seconds"])
    return results


if __name__ == "__main__":
    run(main)
