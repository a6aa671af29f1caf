"""All cases, by the names that ``--only`` takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kernel_cases import (
    cases_attention,
    cases_fp8_cache,
    cases_fp8_products,
    cases_int,
    cases_moe,
    cases_rows,
)
from kernel_cases.bench import KernelCase
from kernel_cases.inputs import Inputs, Sizes

# Operations that decide the speed of long contexts come first, for runs with a time limit.
CASES: dict[str, Callable[[Inputs, Sizes], Iterator[KernelCase]]] = {
    "sparse_prefill": cases_attention.sparse_prefill,
    "indexer_prefill": cases_attention.indexer_prefill,
    "top_k": cases_attention.top_k,
    "sparse_decode": cases_attention.sparse_decode,
    "indexer_decode": cases_attention.indexer_decode,
    "dense_decode": cases_attention.dense_decode,
    "experts": cases_moe.experts,
    "int8": cases_int.int8,
    "int4": cases_int.int4,
    "routing": cases_moe.routing,
    "norms": cases_rows.norms,
    "prologs": cases_rows.prologs,
    "fp8": cases_rows.fp8,
    "fp8_cache": cases_fp8_cache.fp8_cache,
    "fp8_products": cases_fp8_products.fp8_products,
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
