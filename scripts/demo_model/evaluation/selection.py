"""The indexer's selection, observed for recall, and replaced to show whether it matters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dsa_engine.kernels.rows.slots_of import Paging, slots_of
from dsa_engine.model import indexer as indexer_module

SELECTIONS = ("trained", "random", "recent")
ROWS = 256  # queries whose random selection is drawn at once

Watched = dict[int, tuple[int, ...]]  # position of a query: positions of the tokens that it should select


@contextmanager
def selection(kind: str, layers: int, watched: Watched, seed: int = 0) -> Iterator[dict[int, list[dict[int, bool]]]]:
    """Inside the context engines select by ``kind``, and the selections of watched queries are recorded.

    Args:
        kind: "trained" is the indexer's own selection, "random" as many tokens drawn from those that a query sees,
            "recent" the last ones.
        layers: number of layers; each calls the indexer once per step.
        watched: the queries to observe.
        seed: seed of "random".

    Yields:
        by query and layer, whether each of its wanted tokens was selected. Queries that see at most ``index_topk``
        tokens do not select and are missing.
    """
    own: Callable[..., torch.Tensor] = indexer_module.lightning_indexer
    selected: dict[int, list[dict[int, bool]]] = defaultdict(list)
    generator = torch.Generator().manual_seed(seed)

    def select(
        q: torch.Tensor, weights: torch.Tensor, pool: Any, tables: Any, segments: Any, k: int, **options: Any
    ) -> Any:
        paging = Paging(tables, segments.sequences, pool.shape[1])
        if kind == "trained":
            slots = own(q, weights, pool, tables, segments, k, **options)
        else:
            slots = slots_of(_replace(kind, segments.visible.cpu(), k, generator).to(q.device), *paging)
        queries = segments.visible.cpu().long() - 1
        for position in set(queries.tolist()) & watched.keys():
            (row,) = torch.nonzero(queries == position).flatten()[:1].tolist()
            chosen, tokens = set(slots[row].tolist()), torch.tensor([watched[position]], dtype=torch.int32)
            own_paging = paging._replace(sequences=paging.sequences[row : row + 1])
            (wanted,) = slots_of(tokens.to(q.device), *own_paging).tolist()
            pairs = zip(watched[position], wanted, strict=True)
            selected[position].append({token: slot in chosen for token, slot in pairs})
        return slots

    indexer_module.lightning_indexer = select  # type: ignore[assignment]
    try:
        yield selected
    finally:
        indexer_module.lightning_indexer = own


def _replace(kind: str, visible: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """``[rows, k]`` int32 positions, ascending, of queries that see ``visible [rows]`` tokens, more than k each."""
    if kind == "recent":
        return visible[:, None] - k + torch.arange(k, dtype=torch.int32)
    if kind != "random":
        raise ValueError(f"no such selection: {kind!r}; there are {', '.join(SELECTIONS)}")
    rows = []
    for part in visible.split(ROWS):
        longest = int(part.max())
        draw = torch.rand(len(part), longest, generator=generator)
        draw.masked_fill_(torch.arange(longest) >= part[:, None], -1.0)
        rows.append(draw.topk(k, dim=1).indices.sort(dim=1).values.int())
    return torch.cat(rows)
