"""A layer of the engine beside the same layer of ``reference/dsa.py``, for some rows of a request.

Each part gets the engine's own input, and attention the engine's own selection: so no rounding grows over layers, a
near tie costs nothing, and what differs is named by layer and part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from dsa_engine.commands.check.watch import Piece, Rows, joined
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.kernels.formats.fp8 import dequantize_blocks_reference
from dsa_engine.model.layout import released_tensors
from dsa_engine.reference import dsa
from dsa_engine.weights import CheckpointReader
from dsa_engine.weights.formats import Matrix, Unquantized, weight_format
from dsa_engine.weights.index import locate_tensors, open_shard

# Largest errors of a row, relative to it, and of a selected token's score below the page's last one, in standard
# deviations of the row's scores. A layer chains ten operations with the roundings of its formats.
_COARSE, _BFLOAT16, _FLOAT32 = (0.15, 0.5), (4e-2, 0.2), (1e-3, 1e-2)


@dataclass
class Agreement:
    """The rows of one request in one layer."""

    case: str
    layer: int
    positions: list[int]
    attention: float = 0.0  # largest error of a row, relative to it
    feed_forward: float = 0.0  # the same, of rows with the page's experts
    selection: float | None = None  # fraction of the engine's choices that are the page's too; None: there are none
    experts: float | None = None  # the same
    mass: float | None = None  # share of dense attention's mass that the selection carries
    ties: float | None = None  # share of rows in which the last selected token and the next have one score
    random: float | None = None  # that as many random tokens carry
    recent: float | None = None  # that as many last ones carry
    wrong: list[str] = field(default_factory=list)  # what is wrong, and where


# This process on its CPU: each rank compares layers of its own.
_ALONE: Any = SimpleNamespace(size=1, rank=0, device=torch.device("cpu"), all_gather=lambda rows, padded: rows)


class _Experts(dict[int, dsa.Weights]):
    """Experts that are read when they are used: those of a layer of V3.2 need 45 GB in float32."""

    def __init__(self, layer: PageLayer):
        self._layer = layer

    def __missing__(self, expert: int) -> dsa.Weights:
        return self._layer.weights(f"mlp.experts.{expert}.")


class PageLayer:
    """A layer of the page, with the checkpoint's tensors in float32."""

    def __init__(self, folder: Path, engine: Engine, number: int):
        self._engine, self._number, self._files = engine, number, locate_tensors(folder)
        self._reader = CheckpointReader(folder, engine.config.weight_block_size)
        self._shapes = {spec.name: spec.shape for spec in released_tensors(engine.config, False)}
        self._c, self._w = dsa.Config.read(folder), self.weights("")
        self._w.setdefault("mlp", dsa.Weights())["experts"] = _Experts(self)
        given = dsa.Weights(self._w.self_attn | {"indexer": None})  # takes the selection that it is given
        self._attention = dsa.Weights(model=dsa.Weights(layers=[dsa.Weights(self_attn=given)]))
        coarse = engine.cache.format.coded or not isinstance(engine.model.runtime.weights, Unquantized)
        self._error, self._choice = _COARSE if coarse else _FLOAT32 if engine.dtype == torch.float32 else _BFLOAT16
        self._noise = 1e-3 if engine.dtype == torch.float32 else 2e-2  # of the router's input, by rounding

    def weights(self, prefix: str) -> dsa.Weights:
        """The tensors of the layer whose names begin so; all but routed experts without a prefix."""
        weights, start = dsa.Weights(), f"model.layers.{self._number}.{prefix}"
        for name in self._shapes:
            if name.startswith(start) and (prefix or ".experts." not in name):
                weights.put(name.removeprefix(start), self._tensor(name))
        return weights

    def _tensor(self, name: str) -> torch.Tensor:
        """A tensor in float32. INT8 and INT4, which the page does not know, are decoded by the engine's own classes."""
        blocks = self._engine.config.weight_block_size
        if name in self._files:
            stored: torch.Tensor = open_shard(self._files[name]).get_tensor(name)
            if stored.dtype == torch.float8_e4m3fn and blocks is not None:
                scales = open_shard(self._files[f"{name}_scale_inv"]).get_tensor(f"{name}_scale_inv")
                return dequantize_blocks_reference(stored, scales.float(), blocks)
            if stored.is_floating_point() and stored.dtype != torch.float8_e4m3fn:
                return stored.float()
        made = weight_format(self._engine.config.quantization, None, torch.float32, torch.device("cpu"))
        rows, columns = self._shapes[name]
        linear = made.linear(Matrix(name, rows, columns))
        for source in linear.sources:
            self._reader.load(source)
        linear.loaded()
        return linear.dequantized()

    def compare(self, done: dict[str, list[Request]], rows: Rows) -> list[Agreement]:
        """The agreement of every request of the cases ``done``; all begin with the text of the prefill."""
        c, w, layer = self._c, self._w, self._number
        base = joined(rows[done["prefill"][0].id, layer, "h"])[1]  # also where a request's rows were in the cache
        results, requests, inputs = [], [], []
        for case, request in ((case, request) for case, of_case in done.items() for request in of_case):
            own = {kind: pieces for (id, of, kind), pieces in rows.items() if (id, of) == (request.id, layer)}
            at, attended = joined(own["attended"])  # [P], [P, hidden]
            h = joined(own["h"], base[: request.num_cached_tokens or 0])[1].float()  # [n, hidden]
            result = Agreement(case, layer, at.tolist())
            self._compare_attention(result, h, at, attended.float(), own.get("chosen"))
            results.append(result)
            requests.append(own)
            inputs.append(dsa.rms_norm(h[at] + attended, w.post_attention_layernorm, c.rms_norm_eps))
        x = torch.cat(inputs)  # of all requests, as each expert is read once
        moe = w.mlp.gate is not None
        wanted = dsa.experts(w.mlp, c, x, _ALONE, len(x)) if moe else dsa.ffn(w.mlp, x)
        for result, own, x, of_page in zip(results, requests, inputs, wanted.split([len(x) for x in inputs])):
            at, ours = joined(own["fed"])
            same = self._same_experts(result, x, joined(own["experts"])[1].long(), at) if moe else at >= 0
            part = "experts" if moe else "MLP"
            result.feed_forward = self._differ(result, part, ours[same], of_page[same], at[same])
        return results

    def _compare_attention(
        self, result: Agreement, h: torch.Tensor, at: torch.Tensor, ours: torch.Tensor, pieces: list[Piece] | None
    ) -> None:
        c, w, count, measured = self._c, self._w.self_attn, len(h), []
        x = dsa.rms_norm(h, self._w.input_layernorm, c.rms_norm_eps)
        page = dsa.Model(c, self._attention, _ALONE, count, 1, torch.float32)  # a page for each token
        turn = page.turns(torch.arange(count))
        page.latent[0] = latent = dsa.latent_rows(w, c, x, turn)  # [n, 576]
        of, values = joined(pieces) if pieces else (at, at)
        few = at < c.index_topk if c.index_topk else at >= 0
        chosen = values[torch.isin(of, at[~few])].long()
        if c.index_topk and c.indexer_types[self._number] == "full":
            keys = dsa.index_keys(w.indexer, c, x, turn)  # [n, 128]
            for row, best in zip(at[~few].split(1), chosen):
                own, n = (turn[0][row], turn[1][row]), int(row) + 1
                q, compressed = dsa.queries(w, c, x[row], own)
                scores = dsa.index_scores(*dsa.index_queries(w.indexer, c, x[row], compressed, own), keys, row)[0]
                mass = (q[0] @ latent[:n].T * c.softmax_scale).softmax(-1).mean(0)  # [n]
                measured.append([int(row), *self._selection(best, scores[:n], mass)])
        if measured:
            positions, tokens, gaps, *parts = torch.tensor(measured, dtype=torch.float64).T
            means = (float(part.mean()) for part in parts)
            result.ties, result.selection, result.mass, result.random, result.recent = means
            if bool((bad := (tokens != c.index_topk) | (gaps > self._choice)).any()):
                seen = f"{int(tokens[bad][0])} tokens, index_topk is {c.index_topk}, {result.selection:.0%}"
                result.wrong.append(f"selection: {seen} are the page's, {_where(bad, positions)}")
        request, parts = dsa.Request(0, [], count, tables=[list(range(count))]), []
        for rows, best in ((at[few], chosen[:0]), (at[~few], chosen)):  # the few see all before them
            if len(rows):
                batch = dsa.Batch([[(request, rows.tolist())]], prefill=False)
                parts.append(page.attention(0, x[rows], batch, [*best]))
        result.attention = self._differ(result, "attention", ours, torch.cat(parts), at)

    def _selection(self, chosen: torch.Tensor, scores: torch.Tensor, mass: torch.Tensor) -> tuple[float, ...]:
        """Of a row that sees n tokens, by its selection ``[k]`` and the page's index scores and mass of attention
        ``[n]``: how many tokens are selected; by how many standard deviations the lowest one's score is too low;
        whether its border is a tie; the share of them that the page selects; the mass of the selection, of as many
        random tokens, and of the last ones."""
        topk, chosen = self._c.index_topk, chosen[(chosen >= 0) & (chosen < len(scores))].unique()
        best, gap = scores.sort(descending=True, stable=True), 0.0
        last, after = best.values[topk - 1 : topk + 1]
        if len(chosen):
            gap = float((last - scores[chosen].min()) / scores.std().clamp(min=1e-30))
        shared = float(torch.isin(chosen, best.indices[:topk]).float().mean())
        parts = shared, float(mass[chosen].sum()), topk / len(mass), float(mass[-topk:].sum())
        return len(chosen), gap, float(last == after), *parts

    def _same_experts(self, result: Agreement, x: torch.Tensor, ours: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """bool ``[P]``: rows with the page's experts. Where a little noise in ``x`` decides, others are not wrong."""

        def routed(x: torch.Tensor) -> torch.Tensor:
            return dsa.route(self._w.mlp, self._c, x)[0].sort().values

        ids, ours, noise = routed(x), ours.sort().values, torch.Generator().manual_seed(0)
        result.experts = float((ids[:, :, None] == ours[:, None]).any(2).float().mean())
        bad = ~(same := (ids == ours).all(1))
        for _ in range(8):
            moved = x + self._noise * x.std() * torch.randn(x.shape, generator=noise)
            bad &= (routed(moved) == ids).all(1)
        if bool(bad.any()):
            result.wrong.append(f"router: {result.experts:.0%} of the experts are the page's, {_where(bad, at)}")
        return same

    def _differ(
        self, result: Agreement, part: str, ours: torch.Tensor, wanted: torch.Tensor, at: torch.Tensor
    ) -> float:
        """Largest error of a row; adds what is wrong if that is more than is allowed."""
        errors = (ours.float() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
        if bool((bad := ~(errors <= self._error)).any()):
            size = f"{float(ours.norm() / wanted.norm()):.2g} times as large"
            result.wrong.append(f"{part}: errors up to {float(errors.max()):.2g}, {size}, {_where(bad, at)}")
        return float(errors.max()) if len(errors) else 0.0


def _where(bad: torch.Tensor, at: torch.Tensor) -> str:
    return f"in {int(bad.sum())} of {len(at)} rows, the first at position {int(at[bad][0])}"
