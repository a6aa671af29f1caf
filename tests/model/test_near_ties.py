"""Prompts of one repeated phrase, where rounding decides which token is selected last more often than elsewhere.

Keys of equal tokens differ by RoPE alone. So a token for which all heads' products are negative scores exactly 0
wherever it stands, and other scores of equal tokens lie close together. If the border of a selection falls among them,
the engine and ``transformers`` may select another token, and that row's logits, and those of rows that read it, differ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsa_engine import LLM
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from oracles import in_float64, index_vectors

LENGTH, TOPK, LAYERS = 700, 64, 3
EPS = torch.finfo(torch.float32).eps


@torch.no_grad()
def their_selections(
    model: Any, ids: list[int], forced: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Logits, the positions that each layer selects ``[L, k]``, and, of a float64 model, each layer's index scores
    ``[L, L]`` and the magnitudes of what they are sums of. With ``forced`` the layers use that selection."""
    selected, scores = [], []

    def see(indexer: Any, arguments: tuple[Any, ...], _: Any, out: torch.Tensor) -> torch.Tensor:
        selected.append(out[0].long())
        if arguments[0].dtype == torch.float64:
            q, k, weights = index_vectors(indexer, *arguments[:3])
            score = torch.einsum("ths,th->ts", torch.einsum("thd,sd->ths", q, k).relu(), weights)
            norms = torch.einsum("th,th->t", weights.abs(), q.norm(dim=-1))
            scores.append((score, norms[:, None] * k.norm(dim=-1)))
        return out if forced is None else forced[len(selected) - 1].int()[None]

    indexers = [part for name, part in model.named_modules() if name.endswith("indexer")]
    hooks = [indexer.register_forward_hook(see, with_kwargs=True) for indexer in indexers]
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, selected, scores


def our_selections(
    llm: LLM, ids: list[int], patch: pytest.MonkeyPatch, forced: list[torch.Tensor] | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The same of the engine, but for rows that see at most k tokens, which select nothing. The prompt is one step and
    lies in one page."""
    selected: list[torch.Tensor] = []

    def select(q: Any, weights: Any, pool: Any, tables: Any, segments: Any, k: int, **how: Any) -> torch.Tensor:
        slots = lightning_indexer(q, weights, pool, tables, segments, k, **how)
        assert segments.visible.tolist() == list(range(k + 1, len(ids) + 1))
        selected.append(slots.long() % pool.shape[1])
        if forced is None:
            return slots
        return (tables[0, 0] * pool.shape[1] + forced[len(selected) - 1][k:].sort().values).int()

    with patch.context() as patched:
        patched.setattr("dsa_engine.model.indexer.lightning_indexer", select)
        return llm.prompt_logits(ids), selected


@pytest.mark.parametrize(("seed", "phrase"), [(0, 29), (0, 40), (1, 12), (5, 150), (6, 29), (7, 70), (8, 29), (9, 120)])
def test_logits_differ_at_near_ties_only(
    seed: int, phrase: int, oracle: Callable[..., Any], random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the same selection all logits agree. Then each token that only one of the two would select has a score, in
    float64, within float32's rounding of the k-th largest. Each row whose logits differ otherwise has such a swap, or
    reads a row that has one in an earlier layer."""
    made = oracle("deepseek_v32", index_topk=TOPK, num_hidden_layers=LAYERS, seed=seed)
    ids = (random_ids(phrase, seed=seed) * LENGTH)[:LENGTH]
    llm = LLM(made.folder, device="cpu", cache_memory="16MiB", page_size=1024, progress=False)
    theirs, wanted, _ = their_selections(made.model, ids)
    ours, _ = our_selections(llm, ids, monkeypatch)
    same, selected = our_selections(llm, ids, monkeypatch, forced=wanted)
    _, _, scores = their_selections(in_float64(made.model), ids, forced=wanted)
    difference = (ours - theirs).abs().amax(dim=-1)
    assert float((same - theirs).abs().max()) < 1e-5

    swaps = []
    # Rounding errors of a product add up as steps of a random walk; the longest has hidden_size terms.
    bound = made.model.config.hidden_size**0.5 * EPS
    for layer, ((score, magnitude), theirs_of, ours_of) in enumerate(zip(scores, wanted, selected, strict=True)):
        for row in range(TOPK, LENGTH):
            a, b = set(theirs_of[row].tolist()), set(ours_of[row - TOPK].tolist())
            if a == b:
                continue
            border, beyond = score[row, : row + 1].topk(TOPK + 1).values[-2:]
            for name, swapped in (("theirs", sorted(a - b)), ("ours", sorted(b - a))):
                distance, allowed = (score[row, swapped] - border).abs(), bound * magnitude[row, swapped]
                print(
                    f"layer {layer}, row {row}: k-th score {border:.7g}, next {beyond:.7g}; {name} alone {swapped}: "
                    f"{score[row, swapped].tolist()}, allowed {allowed.tolist()}; logits {difference[row]:.1e}"
                )
                assert bool((distance <= allowed).all())
            swaps.append((layer, row))
    for row in (difference > 1e-4).nonzero()[:, 0].tolist():
        assert any(swap == row or (swap < row and layer < LAYERS - 1) for layer, swap in swaps), row
