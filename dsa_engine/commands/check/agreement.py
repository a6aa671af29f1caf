"""Agreement of the engine's layers with the plain model, and the recall of their selections."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from dsa_engine.commands.check.plain import PlainModel, best, in_fp8, in_int8, unrounded, visible
from dsa_engine.commands.check.watch import Rows, joined
from dsa_engine.config.released import RELEASED_BLOCK_SIZE
from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.formats.fp8 import dequantize_blocks_reference, quantize_blocks_reference
from dsa_engine.kernels.runtime.difference import differences
from dsa_engine.weights.formats import Unquantized

_DISTANCES = (64, 512, 4096, 32768)  # borders of the distances by which recall is reported


@dataclass
class Agreement:
    """The rows of one request in one layer.

    Attributes:
        attention, feed_forward: largest error of a row, relative to it; of attention over the engine's own selection.
        shared: fraction of the selected tokens that the definition selects too; None: no row selects.
        wrong: what is wrong, and where.
    """

    case: str
    layer: int
    positions: list[int]
    attention: float = 0.0
    feed_forward: float = 0.0
    shared: float | None = None
    wrong: list[str] = field(default_factory=list)


@dataclass
class Recall:
    """The share of dense attention's mass that selections carry, mean over rows and heads of a layer.

    Attributes:
        selected, random, recent: of the model's selection, of as many random tokens, of the last ones.
        wider, swapped: of four times as many tokens by the indexer; with the other form of its RoPE.
        by_distance: for tokens at each distance from the row: the mass there, and the first three shares of it.
        unchanged: by format, the share of the selection that stays the same.
    """

    layer: int
    selected: float
    random: float
    recent: float
    wider: float
    swapped: float
    by_distance: dict[str, list[float]]
    unchanged: dict[str, float]


class LayerComparison:
    """Compares rows of an engine with the plain model. A layer chains ten operations with the roundings of its formats,
    so its errors may be that much larger than those of one operation."""

    def __init__(self, engine: Engine, plain: PlainModel):
        self._plain, self._config = plain, plain.config
        coarse = engine.cache.format.fp8 or not isinstance(engine.model.runtime.weights, Unquantized)
        fine = engine.dtype == torch.float32 and not coarse
        # Errors of a number, and of a norm: see `differences`.
        self._bounds = (0.3, 0.15) if coarse else (2e-3, 1e-3) if fine else (0.1, 4e-2)
        # A selected token's score below the last one's by definition, in standard deviations of the row's scores.
        self._choice = 0.5 if coarse else 1e-2 if fine else 0.2

    def of(self, case: str, layer: int, request: int, rows: Rows, before: torch.Tensor | None) -> Agreement:
        """The agreement of a request's rows; ``before`` is ``h`` at the positions that it got from the cache."""
        plain, config = self._plain, self._config
        at, attended = joined(rows[request, layer, "attended"])
        h = joined(rows[request, layer, "h"], before)[1].float()
        result, chosen = Agreement(case, layer, at.tolist()), visible(at, len(h))
        sparse = (at >= config.index_topk) & config.has_indexer
        if bool(sparse.any()):
            chosen[sparse] = self._chosen(result, joined(rows[request, layer, "chosen"]), at[sparse], len(h))
            if config.indexer_types[layer] == "full":
                self._compare_choice(result, h, at[sparse], chosen[sparse])
        wanted = plain.attend(layer, h, at, chosen)[0]
        result.attention, bad = self._error(attended, wanted, at)
        if bad:
            other = plain.attend(layer, h, at, chosen, swapped=True)[0]
            why = _size(attended, wanted) or "the cached latent rows, or a projection, are others"
            if (attended - other).norm() < 0.2 * (attended - wanted).norm():
                why = f"it is that with rope_interleave={not config.rope_interleaved}: the form of RoPE is swapped"
            result.wrong.append(f"attention differs at {bad}: {why}")
        added, fed = h[at] + attended.float(), joined(rows[request, layer, "fed"])[1]
        sure = self._sure(layer, added)
        at, added, fed, wanted = at[sure], added[sure], fed[sure], plain.feed_forward(layer, added[sure])
        result.feed_forward, bad = self._error(fed, wanted, at, near_ties=True) if len(at) else (0.0, "")
        if bad:
            why = _size(fed, wanted) or self._why_experts(layer, added, fed.float(), wanted)
            result.wrong.append(f"the feed-forward part differs at {bad}: {why}")
        return result

    def _sure(self, layer: int, h: torch.Tensor) -> torch.Tensor:
        """bool ``[rows]``: rows whose experts stay the same if rounding moves their input."""
        sure = torch.ones(len(h), dtype=torch.bool)
        if self._config.mlp_layer_types[layer] == "sparse":
            x, noise = self._plain.normed(layer, h, "post_attention"), torch.Generator().manual_seed(0)
            ids = self._plain.routed(layer, x)[0].sort().values
            for _ in range(8):
                moved = x + self._bounds[1] * x.std() * torch.randn(x.shape, generator=noise)
                sure &= (self._plain.routed(layer, moved)[0].sort().values == ids).all(1)
        return sure

    def _error(
        self, ours: torch.Tensor, wanted: torch.Tensor, at: torch.Tensor, near_ties: bool = False
    ) -> tuple[float, str]:
        """Largest error of a row, and the positions that differ, if they do by more than is allowed."""
        norms = wanted.norm(dim=1, keepdim=True).clamp(min=1e-30)
        ours, wanted = ours.float() / norms, wanted / norms
        measured = differences(ours, wanted, kind="near ties" if near_ties else "plain", bounds=self._bounds)
        errors = (ours - wanted).norm(dim=1)
        differ = any(not error <= bound for error, bound in measured)
        return float(errors.max()), _listed(at[~(errors <= self._bounds[1])]) or "all rows" if differ else ""

    def _chosen(
        self, result: Agreement, picked: tuple[torch.Tensor, torch.Tensor], at: torch.Tensor, tokens: int
    ) -> torch.Tensor:
        """bool ``[rows, tokens]``: the engine's selection, ``index_topk`` tokens that differ and that the row sees."""
        slots, topk = picked[1][torch.searchsorted(picked[0], at)], self._config.index_topk
        mask = torch.zeros(len(at), tokens + 1, dtype=torch.bool).scatter_(1, slots.where(slots >= 0, tokens), True)
        mask = mask[:, :-1] & visible(at, tokens)
        counts = mask.sum(1)
        if bool((odd := counts != topk).any()):
            seen = f"{int(counts[odd][0])} tokens are selected at {_listed(at[odd])}"
            result.wrong.append(f"{seen}, index_topk is {topk}")
        return mask

    def _compare_choice(self, result: Agreement, h: torch.Tensor, at: torch.Tensor, chosen: torch.Tensor) -> None:
        topk, scores = self._config.index_topk, self._plain.scores(result.layer, h, at)
        wanted = best(scores, topk)
        result.shared = overlap(wanted, chosen)
        seen = scores.where(visible(at, len(h)), torch.nan)
        spread = (seen - seen.nanmean(1, keepdim=True)).square().nanmean(1).sqrt().clamp(min=1e-30)
        lowest = [scores.masked_fill(~some, torch.inf).amin(1) for some in (wanted, chosen)]
        if not bool((bad := (lowest[0] - lowest[1]) / spread > self._choice).any()):
            return
        why = "its index keys or queries are others, or missing"
        if overlap(best(self._plain.scores(result.layer, h, at, swapped=True), topk), chosen) > max(0.9, result.shared):
            other = not self._config.index_rope_interleaved
            why = f"it is that with index_rope_interleaved={other}: the form of the indexer's RoPE is swapped"
        result.wrong.append(
            f"the selection is not the indexer's at {_listed(at[bad])}, but {result.shared:.0%} of it: {why}"
        )

    def _why_experts(self, layer: int, h: torch.Tensor, ours: torch.Tensor, wanted: torch.Tensor) -> str:
        """Finds the experts whose outputs add up to the worst row."""
        plain, config = self._plain, self._config
        if config.mlp_layer_types[layer] == "dense":
            return "its weights are others"
        row = int((ours - wanted).norm(dim=1).argmax())
        x = plain.normed(layer, h[row : row + 1], "post_attention")
        outputs = torch.cat([plain.mlp(layer, f"mlp.experts.{e}", x) for e in range(config.n_routed_experts)]).double()
        routed = (ours[row] - plain.mlp(layer, "mlp.shared_experts", x)[0]).double()
        weights = torch.linalg.lstsq(outputs.T, routed[:, None], driver="gelsd").solution[:, 0]
        used, (ids, meant) = weights.topk(config.num_experts_per_tok), plain.routed(layer, x)
        if float((weights @ outputs - routed).norm()) < 0.1 * float(routed.norm()):
            answer = f"experts {sorted(used.indices.tolist())} answer where {sorted(ids[0].tolist())} are the router's"
            if torch.allclose(used.values, meant[0].sort(descending=True).values.double(), rtol=0.02):
                return f"{answer}, with their weights: the order of the experts is another"
            return f"{answer}: it routes otherwise"
        return "the experts' weights are others"

    def recall(self, layer: int, h: torch.Tensor, rows: torch.Tensor) -> Recall:
        """The recall of ``rows`` (positions beyond ``index_topk``) in a layer with an indexer; ``h`` of all tokens."""
        plain, topk = self._plain, self._config.index_topk
        scores, age = plain.scores(layer, h, rows), rows[:, None] - torch.arange(len(h))
        chosen, seen = best(scores, topk), age >= 0
        mass = plain.attend(layer, h, rows, chosen)[1]
        three = [chosen.float(), (topk / (rows[:, None] + 1.0)).expand_as(mass), (age < topk).float()]
        # Four times as many are no evidence where they are nearly all.
        wider = (
            best(scores, 4 * topk if 8 * topk < len(h) else topk),
            best(plain.scores(layer, h, rows, swapped=True), topk),
        )

        def carried(by: torch.Tensor, where: torch.Tensor = seen) -> float:
            return float((mass * by * where).sum() / (mass * where).sum().clamp(min=1e-30))

        by_distance, first = {}, 0
        for border in (*_DISTANCES, len(h)):
            where = (age >= first) & (age < border)
            if bool(where.any()):
                there = float((mass * where).sum() / len(rows))
                name = f"{first} to {min(border, len(h)) - 1}"
                by_distance[name] = [there, *(carried(by, where) for by in three)]
            first = border
        unchanged, formats = {}, {"FP8 caches": (unrounded, in_fp8), "FP8 weights": (_in_blocks, unrounded)}
        for name, rounding in (formats | {"INT8 weights": (in_int8, unrounded)}).items():
            unchanged[name] = overlap(chosen, best(plain.scores(layer, h, rows, False, *rounding), topk))
        selected, random, recent, more, swapped = map(carried, (*three, *wider))
        return Recall(layer, selected, random, recent, more, swapped, by_distance, unchanged)


def overlap(wanted: torch.Tensor, chosen: torch.Tensor) -> float:
    """Fraction of the ``chosen`` tokens that are ``wanted``."""
    return float((wanted & chosen).sum() / chosen.sum().clamp(min=1))


def _listed(at: torch.Tensor) -> str:
    shown = ", ".join(map(str, at[:4].tolist()))
    return f"position {shown}" + (f" and {len(at) - 4} more" if len(at) > 4 else "") if len(at) else ""


def _size(ours: torch.Tensor, wanted: torch.Tensor) -> str:
    ratio = float(ours.float().norm() / wanted.norm().clamp(min=1e-30))
    return "" if 0.2 < ratio < 5 else f"it is {ratio:.3g} times as large, as if scales of weights were not applied"


def _in_blocks(weight: torch.Tensor) -> torch.Tensor:
    return dequantize_blocks_reference(*quantize_blocks_reference(weight, RELEASED_BLOCK_SIZE), RELEASED_BLOCK_SIZE)
