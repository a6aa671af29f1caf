"""Forms of context parallelism compared: bytes sent, work and time of one prefill.

Cache rows by all-gather with tokens head-tail (the engine's way) or contiguous, heads by all-to-all (DeepSpeed's
Ulysses), and a ring of blocks in two passes: one layer of DSA between its projections, the same weights and tokens.
Every token selects. All outputs are compared with those of a single process before anything is timed. Start it on two
ranks or more:

    torchrun --nproc-per-node 2 scripts/studies/compare_context_parallel.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsa_engine.commands.arguments import add_json_argument, argument_parser, lengths, reported, run
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import latent_format
from dsa_engine.measure.report import environment, format_table, write_json
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.group import Group
from dsa_engine.reference import dsa
from dsa_engine.system.output_files import check_outputs
from random_layer import SIZES, Layer, Tokens

# Relative errors: of all rows together, and of the median row. Rounding sometimes changes the last selected token at a
# near tie, which changes single rows by a hundredth.
MAX_ERRORS = {torch.float32: (1e-3, 1e-5), torch.bfloat16: (5e-2, 5e-2)}
WORKSPACE = 256 << 20  # bytes of scores at a time
Blocks = Iterable[tuple[Tensor, Tensor]]  # positions [n], ascending, and cache rows [n, width]


class Divided(Layer):
    """What every form does with the layer."""

    def select_of(self, tokens: Tokens, own: Tensor, blocks: Blocks) -> Tensor:
        """Positions ``[T, topk]`` that tokens at positions ``own [T]`` attend to, the best of all blocks; −1 after the
        last. A selection is final only after the last key has been scored."""
        _, _, index_q, weights = tokens
        scores = torch.full((len(own), self.size.topk), float("-inf"), device=own.device)
        best = torch.full_like(scores, -1, dtype=torch.int64)
        for positions, keys in blocks:
            visible = torch.searchsorted(positions, own, right=True)  # keys of the block that a token sees
            rows = min(256, max(1, WORKSPACE // (4 * len(keys) * self.size.index_heads)))
            for first in range(0, len(own), rows):
                part = slice(first, first + rows)
                seen = int(visible[part][-1])
                new = dsa.index_scores(index_q[part], weights[part], keys[:seen], visible[part] - 1)
                scores[part], chosen = torch.cat((scores[part], new), 1).topk(scores.shape[1])
                best[part] = torch.cat((best[part], positions[:seen].expand(len(new), -1)), 1).gather(1, chosen)
        return best.masked_fill_(scores == float("-inf"), -1)

    def attend(self, q: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Attention ``[T, heads, kv_rank]`` of absorbed queries over ``rows [n, latent]`` in ``slots [T, k]``, −1 after
        the last, and its log-sum-exp ``[T, heads]``."""
        form = latent_format(self.size.kv_rank, self.size.rope, q.dtype)
        pool, scale = rows[:, None].contiguous(), self.c.softmax_scale  # pages of one row
        return sparse_attention(q, pool, slots.int(), row_format=form, scale=scale, workspace=WORKSPACE)


class HeadTail:
    """Rank r has the pieces r and ``2 · ranks − 1 − r`` of ``2 · ranks``: the same causal work on all ranks.

    Each rank gets all latent rows and index keys, packed side by side, and computes all heads of its own tokens. The
    gather is issued first and overlaps with work on local tokens.
    """

    divides_heads = False

    def __init__(self, layer: Divided, group: Group, length: int):
        self.layer, self.group, self.length = layer, group, length
        of_ranks = [self.of_rank(rank) for rank in range(group.size)]
        self.positions = [torch.tensor(own, dtype=torch.int64, device=layer.w_uk.device) for own in of_ranks]
        self.own = self.positions[group.index]
        self.rows = max(map(len, self.positions))  # of each rank in a collective, padding included

    def of_rank(self, rank: int) -> list[int]:
        """Positions of a rank's tokens, ascending."""
        return dsa.head_tail(0, self.length, rank, self.group.size)

    def run(self, tokens: Tokens) -> Tensor:
        """``[T, heads, value]`` of this rank's tokens; every rank calls it."""
        gathering = self.group.all_gather_async(padded(tokens[1], self.rows))
        q = self.layer.absorb(tokens[0])
        latent, slots = self.latent_and_slots(tokens, gathering())
        return self.layer.values(self.layer.attend(q, latent, slots)[0])

    def latent_and_slots(self, tokens: Tokens, gathered: Tensor) -> tuple[Tensor, Tensor]:
        """All latent rows in order, and what this rank's tokens select, of gathered rows ``[ranks * rows, width]``."""
        all_rows = gathered.new_empty(self.length, gathered.shape[1])
        for positions, rows in zip(self.positions, gathered.split(self.rows), strict=True):
            all_rows[positions] = rows[: len(positions)]
        latent, keys = all_rows.split((self.layer.latent, self.layer.size.index_dim), 1)
        order = torch.arange(self.length, device=keys.device)
        return latent, self.layer.select_of(tokens, self.own, [(order, keys)])

    def work(self) -> list[float]:
        """Operations of each rank: two for a multiply-add."""
        s, seen = self.layer.size, [positions + 1 for positions in self.positions]
        scored = [2.0 * int(of.sum()) * s.index_heads * s.index_dim for of in seen]
        pair = 2.0 * s.heads * (self.layer.latent + s.kv_rank)
        attended = [int(of.clamp(max=s.topk).sum()) * pair for of in seen]
        if self.divides_heads:
            attended = [statistics.mean(attended)] * len(attended)
        return [sum(both) for both in zip(scored, attended, strict=True)]


class Contiguous(HeadTail):
    """The same with one contiguous piece per rank: the tokens of the last rank see the most."""

    def of_rank(self, rank: int) -> list[int]:
        return list(range(*(self.length * r // self.group.size for r in (rank, rank + 1))))


class Ulysses(HeadTail):
    """Tokens are divided outside of the attention and heads within it, by all-to-all (DeepSpeed, 2023).

    MLA has one latent row for all heads, so every rank still needs all rows, by the gather. DSA selects once for all
    heads of a token. So each rank selects for its own tokens, and every selection is sent to every rank: ``topk``
    numbers of 4 bytes, more than the token's cache row. Queries are sent before W_UK is absorbed, results after W_UV.
    """

    divides_heads = True

    def __init__(self, layer: Divided, group: Group, length: int):
        super().__init__(layer, group, length)
        each, rest = divmod(layer.size.heads, group.size)
        if rest:
            raise ValueError(f"ulysses divides heads: {layer.size.heads} heads, {group.size} ranks; name other --forms")
        self.heads = slice(group.index * each, (group.index + 1) * each)

    def run(self, tokens: Tokens) -> Tensor:
        latent, own = self.latent_and_slots(tokens, self.group.all_gather(padded(tokens[1], self.rows)))
        slots, ranks = self.group.all_gather(padded(own.int(), self.rows, -1)), self.group.size
        by_heads = padded(tokens[0], self.rows).unflatten(1, (ranks, -1)).transpose(0, 1)
        q = self.group.all_to_all(by_heads.flatten(0, 1))  # [ranks * rows, heads / ranks, nope + rope], of all tokens
        out, _lse = self.layer.attend(self.layer.absorb(q, self.heads), latent, slots)
        back = self.group.all_to_all(self.layer.values(out, self.heads)).unflatten(0, (ranks, -1))
        return back.transpose(0, 1).flatten(1, 2)[: len(self.own)]  # [T, heads, value]


class Ring(HeadTail):
    """Blocks of cache rows go from neighbour to neighbour, and no rank holds more than two. Head-tail, so that a rank
    scores equally many pairs with each block. Softmax can be merged, by its log-sum-exp; a selection cannot. So the
    ring runs twice: index keys arrive in the first pass, latent rows in the second."""

    def run(self, tokens: Tokens) -> Tensor:
        latent, keys = tokens[1].split((self.layer.latent, self.layer.size.index_dim), 1)
        selected = self.layer.select_of(tokens, self.own, self.blocks(keys))
        q = self.layer.absorb(tokens[0])
        out = torch.zeros(*q.shape[:2], self.layer.size.kv_rank, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
        for positions, block in self.blocks(latent):
            row_at = torch.full((self.length + 1,), -1, device=q.device)  # the last one: of -1
            row_at[positions] = torch.arange(len(positions), device=q.device)
            slots = row_at[selected].sort(descending=True).values  # -1: not in this block
            width = int((slots >= 0).sum(1).max()) if len(slots) else 0
            if width:
                more, more_lse = self.layer.attend(q, block, slots[:, :width])
                both = torch.logaddexp(lse, more_lse)
                top = both.masked_fill(both == float("-inf"), 0.0)
                out.mul_((lse - top).exp()[..., None]).addcmul_(more.float(), (more_lse - top).exp()[..., None])
                lse = both
        return self.layer.values(out.to(q.dtype))

    def blocks(self, own: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every rank's rows ``[n, width]``, this rank's first. The next block is sent during the work on one."""
        index, size, handle = self.group.index, self.group.size, self.group.handle
        here = padded(own, self.rows).contiguous()
        coming = torch.empty_like(here)
        for step in range(size):
            moving = []
            if step < size - 1:
                self.group.bytes_sent += here.nbytes
                send = dist.P2POp(dist.isend, here, group=handle, group_peer=(index + 1) % size)
                receive = dist.P2POp(dist.irecv, coming, group=handle, group_peer=(index - 1) % size)
                moving = dist.batch_isend_irecv([send, receive])
            positions = self.positions[(index - step) % size]
            if len(positions):
                yield positions, here[: len(positions)]
            for work in moving:
                work.wait()
            here, coming = coming, here


def padded(rows: Tensor, count: int, value: float = 0) -> Tensor:
    """``rows [T, ...]`` with padding after them: ``[count, ...]``."""
    return torch.cat((rows, rows.new_full((count - len(rows), *rows.shape[1:]), value)))


FORMS = {"head-tail": HeadTail, "contiguous": Contiguous, "ulysses": Ulysses, "ring": Ring}


@torch.inference_mode()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--size", choices=("v3.2", "small"), help="of the layer (default: v3.2; small on a CPU)")
    parser.add_argument("--input-len", type=lengths, default=[2048, 4096, 8192], help="tokens of the sequence")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="some of them (default: all)")
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each, in turn")
    add_json_argument(parser)
    args = parser.parse_args()
    check_outputs(args.json)
    mesh = Mesh.create(ParallelConfig(), "auto", same=lambda: {"options": str(vars(args))})
    if mesh.world_size == 1:
        raise ValueError("one rank has nothing to divide; start several: torchrun --nproc-per-node 2 …")
    dtype, size = (torch.bfloat16, "v3.2") if mesh.device.type == "cuda" else (torch.float32, "small")
    args.size = args.size or size
    layer = Divided(SIZES[args.size], dtype, mesh.device)
    results = [result for length in args.input_len for result in compare(layer, mesh, length, args)]
    if not mesh.is_leader:
        return
    if args.json:
        about = environment(mesh.device, dtype, mesh.world_size)
        write_json(args.json, about | {"options": reported(args), "results": results})
    print(f"One layer of size {args.size}, {mesh.world_size} ranks; values of the slowest rank.")
    print(
        f"ratio: to {args.forms[0]}; sent_bytes: of a rank; imbalance: of work; error: the difference to one process\n"
    )
    columns = ("length", "form", "median_ms", "ratio", "sent_bytes", "imbalance", "relative_error")
    print(format_table(columns, [[r[column] for column in columns] for r in results]))


def compare(layer: Divided, mesh: Mesh, length: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs every form once for its output, then all in turn for their times; the same results on every rank.

    Raises:
        RuntimeError: an output differs from the single process's; then nothing is timed.
    """

    def of_all(value: float) -> list[float]:
        return mesh.world.all_gather(torch.tensor([value], dtype=torch.float64, device=mesh.device)).tolist()

    whole, results, runs = layer.tokens(length), [], []
    of_whole = layer.absorbed(whole, layer.select(whole)).double()
    for name in args.forms:
        form = FORMS[name](layer, mesh.world, length)
        tokens = tuple(tensor[form.own] for tensor in whole)
        expected = of_whole[form.own]
        sent = -mesh.world.bytes_sent
        out = form.run(tokens)
        sent += mesh.world.bytes_sent
        difference, norm = (x.flatten(1).norm(dim=1) for x in (out.double() - expected, expected))
        errors = [sum(of_all(float(x.square().sum()))) for x in (difference, norm)]
        error, median = (errors[0] / errors[1]) ** 0.5, float((difference / norm).median()) if len(norm) else 0.0
        allowed, allowed_median = MAX_ERRORS[out.dtype]
        if not (error <= allowed and max(of_all(median)) <= allowed_median):
            raise RuntimeError(f"{name} differs from the single process by {error:.1e} at {length} tokens: not timed")
        result: dict[str, Any] = {"form": name, "length": length, "seconds": [], "relative_error": error}
        result |= {"sent_bytes": int(max(of_all(sent)))}
        results.append(result | {"imbalance": max(form.work()) / statistics.mean(form.work())})
        runs.append((form, tokens))
    for _ in range(args.repeat):
        for result, (form, tokens) in zip(results, runs, strict=True):
            of_all(0.0)  # all ranks begin together
            begin = time.perf_counter()
            form.run(tokens)
            if mesh.device.type == "cuda":
                torch.cuda.synchronize(mesh.device)
            result["seconds"].append(max(of_all(time.perf_counter() - begin)))
    for result in results:
        result["median_ms"] = statistics.median(result["seconds"]) * 1e3
        result["ratio"] = result["median_ms"] / results[0]["median_ms"]
    return results


if __name__ == "__main__":
    run(main)
