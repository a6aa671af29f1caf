"""All cases, by the names that ``--only`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernel_cases import attention, products, routing, rows
from kernel_cases.inputs import Inputs, KernelCase, Sizes
from variants.products import variant_products
from variants.scores import variant_scores
from variants.topk import variant_topk

# Operations that decide the speed of long contexts come first, for runs with a time limit.
CASES: dict[str, Callable[[Inputs, Sizes], Iterator[KernelCase]]] = {
    "sparse_prefill": attention.sparse_prefill,
    "indexer_prefill": attention.indexer_prefill,
    "top_k": attention.top_k,
    "candidates": attention.candidates,
    "sparse_decode": attention.sparse_decode,
    "indexer_decode": attention.indexer_decode,
    "dense_decode": attention.dense_decode,
    "experts": products.experts,
    "linear": products.linear,
    "routing": routing.routing,
    "norms": rows.norms,
    "prologs": rows.prologs,
    "hot_rows": rows.hot_rows,
    "quantise": rows.quantise,
    "variant_products": variant_products,
    "variant_scores": variant_scores,
    "variant_topk": variant_topk,
}


def named(names: str | None) -> list[str]:
    """The names in a list separated by commas; all without a list.

    Raises:
        ValueError: an unknown name.
    """
    chosen = names.split(",") if names else list(CASES)
    if unknown := [name for name in chosen if name not in CASES]:
        raise ValueError(f"no kernel is named {', '.join(unknown)}; --only takes some of {', '.join(CASES)}")
    return chosen
