"""Forms of Multi-head Latent Attention in decode: cached bytes, operations and time of each.

CD        caches keys and values of every head, decompressed: plain multi-head attention
CC        caches the latent row and the rotated key part, and decompresses both in every step
A_CC      the same cache; W_UK absorbed into the query, W_UV after the sum: attention over latent rows, whose two parts
          are first copied into one
A_CC_ME   the same without the copy: two products whose scores are added ("move elision")
AM_CC_ME  the same with W_UQ · W_UK and W_UV · W_O multiplied beforehand
engine    both parts in one row of a paged pool; absorbed

One layer, one new token per sequence, the same weights. All outputs are compared before anything is timed. The five
names are those of the published study of these forms with DeepSeek-V2's sizes (MADSys group, Tsinghua, 2024).
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.kernels.attention.dense_mla import dense_mla
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.kernels.rows.segment import Segment, Segments
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.reference import dsa
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from random_layer import SIZES, Size

PAGE_SIZE = 64
Cache = tuple[Any, ...]  # tensors; of the engine also the segments of the queries
Turn = tuple[Tensor, Tensor]  # cos and sin [B, rope / 2]


class Absorbed:
    """The reference's attention, of which other forms replace parts; ``weights`` are the tensors that a step reads."""

    reads: tuple[str, ...] = ("q_b_proj", "kv_b_proj", "o_proj")

    def __init__(self, size: Size, w: dsa.Weights):
        self.size, self.c, self.w = size, size.config(), w
        self.w_uk, self.w_uv = dsa.up_projections(w, self.c)  # [heads, nope, kv_rank], [heads, value, kv_rank]
        self.weights = [getattr(w, name) for name in self.reads]

    def cache(self, latent: Tensor, rotated: Tensor) -> Cache:
        """For ``latent [B, S, kv_rank]`` and ``rotated [B, S, rope]``."""
        return latent.clone(), rotated.clone()

    def decode(self, compressed: Tensor, turn: Turn, cache: Cache) -> Tensor:
        """The layer's output ``[B, hidden]`` for compressed queries ``[B, q_rank]`` over all cached tokens."""
        plain, rotated = self.queries(compressed, turn)
        return dsa.output(self.w, self.c, self.attend(torch.einsum("bhd,hdr->bhr", plain, self.w_uk), rotated, cache))

    def queries(self, compressed: Tensor, turn: Turn) -> tuple[Tensor, Tensor]:
        """``[B, heads, nope]`` and, rotated, ``[B, heads, rope]``."""
        q = F.linear(compressed, self.w.q_b_proj).unflatten(-1, (self.size.heads, -1))
        return q[..., : self.size.nope], dsa.rotate(q[..., self.size.nope :], turn, interleaved=True)

    def attend(self, q: Tensor, q_rotated: Tensor, cache: Cache) -> Tensor:
        """Weighted latent rows ``[B, heads, kv_rank]`` for ``q [B, heads, kv_rank]`` and ``[B, heads, rope]``."""
        rows, last = torch.cat(cache, -1), torch.full((1,), cache[0].shape[1] - 1, device=q.device)
        one_each = zip(torch.cat((q, q_rotated), -1).split(1), rows, strict=True)
        rank, scale = self.size.kv_rank, self.c.softmax_scale
        return torch.cat([dsa.attend(one, of_one, last, None, rank, scale) for one, of_one in one_each])


class Compressed(Absorbed):
    def decompress(self, latent: Tensor, rotated: Tensor) -> Cache:
        """Keys ``[B, heads, S, nope + rope]`` and values ``[B, heads, S, value]`` of every head."""
        keys = torch.einsum("bsr,hdr->bhsd", latent, self.w_uk)
        keys = torch.cat((keys, rotated[:, None].expand(-1, self.size.heads, -1, -1)), -1)
        return keys, torch.einsum("bsr,hvr->bhsv", latent, self.w_uv).contiguous()

    def decode(self, compressed: Tensor, turn: Turn, cache: Cache) -> Tensor:
        return self.over_heads(compressed, turn, self.decompress(*cache))

    def over_heads(self, compressed: Tensor, turn: Turn, cache: Cache) -> Tensor:
        keys, values = cache
        scores = (keys @ torch.cat(self.queries(compressed, turn), -1)[..., None])[..., 0] * self.c.softmax_scale
        return F.linear((scores.softmax(-1)[:, :, None] @ values).flatten(1), self.w.o_proj)


class Decompressed(Compressed):
    cache, decode = Compressed.decompress, Compressed.over_heads
    reads = ("q_b_proj", "o_proj")  # kv_b_proj is needed once per token, not in every step


class MoveElision(Absorbed):
    def attend(self, q: Tensor, q_rotated: Tensor, cache: Cache) -> Tensor:
        latent, rotated = cache
        scores = q @ latent.mT
        scores += q_rotated @ rotated.mT
        return (scores * self.c.softmax_scale).softmax(-1) @ latent


class Materialized(MoveElision):
    def __init__(self, size: Size, w: dsa.Weights):
        super().__init__(size, w)
        uq, qr = w.q_b_proj.unflatten(0, (size.heads, -1)).split((size.nope, size.rope), 1)
        q = torch.einsum("hdr,hdq->hrq", self.w_uk, uq).flatten(0, 1)  # [heads * kv_rank, q_rank]
        o = torch.einsum("hvr,ohv->ohr", self.w_uv, w.o_proj.unflatten(1, (size.heads, -1)))
        self.weights = [q, qr.flatten(0, 1), o.flatten(1)]  # o: [hidden, heads * kv_rank]

    def decode(self, compressed: Tensor, turn: Turn, cache: Cache) -> Tensor:
        q, rotated = (F.linear(compressed, w).unflatten(1, (self.size.heads, -1)) for w in self.weights[:2])
        summed = self.attend(q, dsa.rotate(rotated, turn, interleaved=True), cache)
        return F.linear(summed.flatten(1), self.weights[2])


class Engine(Absorbed):
    """The engine's :func:`~dsa_engine.kernels.attention.dense_mla.dense_mla`; on a CPU its reference."""

    def cache(self, latent: Tensor, rotated: Tensor) -> Cache:
        batch, count, _ = latent.shape
        pages = cdiv(count, PAGE_SIZE)
        rows = F.pad(torch.cat((latent, rotated), -1), (0, 0, 0, pages * PAGE_SIZE - count))
        tables = torch.arange(batch * pages, dtype=torch.int32, device=latent.device).view(batch, pages)
        last = Segments.of((Segment(i, 1, i, count - 1) for i in range(batch)), latent.device)
        return rows.view(batch * pages, PAGE_SIZE, -1), tables, last

    def attend(self, q: Tensor, q_rotated: Tensor, cache: Cache) -> Tensor:
        form, scale = latent_format(self.size.kv_rank, self.size.rope, q.dtype), self.c.softmax_scale
        return dense_mla(torch.cat((q, q_rotated), -1), *cache, row_format=form, scale=scale)[0]


FORMS = {"CD": Decompressed, "CC": Compressed, "A_CC": Absorbed, "A_CC_ME": MoveElision}
FORMS |= {"AM_CC_ME": Materialized, "engine": Engine}


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=("v2", "v3.2"), default="v3.2", help="whose attention")
    parser.add_argument("--context", type=lengths, default=[512, 2048], help="cached tokens of a sequence")
    parser.add_argument("--batch-size", type=lengths, default=[1, 4], help="sequences at once")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    add_json_argument(parser)
    args = parser.parse_args()
    check_outputs(args.json)
    device, size = torch.device(args.device), SIZES[args.size]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    counts = {name: count(name, size) for name in FORMS}
    rows = [
        (name, f"{c['cache_bytes'] / 1e3:.3f}", f"{c['flops'] / 1e6:.2f}", format_bytes(int(c["weight_bytes"])))
        for name, c in counts.items()
    ]
    header = ("form", "cache kB a token", "MFLOP a cached token", "weights read")
    print("Counted, one layer, bfloat16:\n\n" + format_table(header, rows))
    weights = size.weights(dtype, device)
    forms = {name: form(size, weights) for name, form in FORMS.items()}
    results = []
    for batch in args.batch_size:
        for context in args.context:
            results += measure(forms, batch, context, args.repeat)
    columns = ("batch_size", "context", "form", "median_ms", "ratio_to_engine", "relative_error")
    print("\nMeasured; context: cached tokens of each sequence; error: the difference to CD\n")
    print(format_table(columns, [[r[column] for column in columns] for r in results]))
    if args.json:
        about = environment(device, dtype, 1) | {"options": reported(args), "counted": counts, "results": results}
        write_json(args.json, about)


def count(name: str, size: Size) -> dict[str, float]:
    """Cached bytes and operations per cached token, and bytes of weights, of one step of a form in bfloat16: counted
    from the products and tensors of two steps with different contexts. Block tables are not counted."""
    device = "cpu" if name == "engine" else "meta"  # the kernel's loops need values of sizes, the others only shapes
    form = FORMS[name](size, size.weights(torch.bfloat16, device))
    cached, operations = [], []
    for tokens in (PAGE_SIZE, 2 * PAGE_SIZE):
        shapes = ((1, tokens, size.kv_rank), (1, tokens, size.rope), (1, size.q_rank))
        latent, rotated, q = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        angles = torch.zeros(1, size.rope // 2, device=device)
        cache = form.cache(latent, rotated)
        with FlopCounterMode(display=False) as counter:
            form.decode(q, (angles, angles), cache)
        cached.append(sum(part.nbytes for part in cache if isinstance(part, Tensor) and part.is_floating_point()))
        operations.append(counter.get_total_flops())
    per_token = [(more - few) / PAGE_SIZE for few, more in (cached, operations)]
    weights = sum(weight.nbytes for weight in form.weights)
    return {"cache_bytes": per_token[0], "flops": per_token[1], "weight_bytes": weights}


def measure(forms: dict[str, Absorbed], batch: int, context: int, repeat: int) -> list[dict[str, Any]]:
    """Of every form: seconds of its runs, which take turns, and the difference of its output to the first form's;
    ``RuntimeError`` if it is more than rounding, before anything is timed."""
    size, like = forms["engine"].size, forms["engine"].w_uk
    shapes = ((batch, context, size.kv_rank), (batch, context, size.rope), (batch, size.q_rank))
    latent, rotated, q = (torch.randn(shape, dtype=like.dtype, device=like.device) for shape in shapes)
    angle = torch.arange(size.rope // 2, device=like.device).float().expand(batch, -1)
    caches = {name: form.cache(latent, rotated) for name, form in forms.items()}

    def decode(name: str) -> Tensor:
        return forms[name].decode(q, (angle.cos(), angle.sin()), caches[name])

    expected = decode("CD").double()
    errors = {name: float((decode(name) - expected).norm() / expected.norm()) for name in forms}
    max_error = 5e-2 if like.is_cuda else 1e-4
    if bad := [f"{name} by {error:.1e}" for name, error in errors.items() if not error <= max_error]:
        raise RuntimeError(f"these differ from CD: {', '.join(bad)}; not timed")
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repeat):
        for name, times in seconds.items():
            begin = time.perf_counter()
            decode(name)
            if like.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    ms = {name: statistics.median(of) * 1e3 for name, of in seconds.items()}
    return [
        {"batch_size": batch, "context": context, "form": name, "relative_error": errors[name]}
        | {"seconds": seconds[name], "median_ms": ms[name], "ratio_to_engine": ms[name] / ms["engine"]}
        for name in forms
    ]


if __name__ == "__main__":
    run(main)
