"""DeepGEMM behind :func:`.indexer_scores.indexer_scores` of FP8 pools: ``fp8_paged_mqa_logits`` for a few queries of
each sequence, ``fp8_mqa_logits`` for many.

Signatures of version 2.6.1 (commit 54e22612, June 2026): lengths ``[sequences, queries]``, and logits as wide as the
longest sequence (``max_seqlen_k``); earlier versions are left out when they are tried. Pages of 64 keys, whose bytes
are ours; 32 or 64 heads, on sm_90 and sm_100.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch

from dsa_engine.kernels.formats.fp8_cache import FP8IndexKeys
from dsa_engine.kernels.formats.row_format import IndexKeyFormat
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.kernels.runtime.launch import chip_of
from dsa_engine.kernels.runtime.libraries import adapter
from dsa_engine.kernels.runtime.transfer import upload

_PAGE_SIZE = 64
_FEW_QUERIES = 8  # a sequence: drafts, for which it is better to stream its keys than to gather them


def _takes(
    few: bool, q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor,
    segments: Segments, *, key_format: IndexKeyFormat, **_: Any,
) -> bool:  # fmt: skip
    return (
        isinstance(key_format, FP8IndexKeys)
        and (q.dtype, weights.dtype, block_tables.dtype) == (torch.float8_e4m3fn, torch.float32, torch.int32)
        and q.shape[1] in (32, 64)
        and q.shape[2] in (32, 64, 128)
        and pool.shape[1] == _PAGE_SIZE
        and pool.is_contiguous()
        and (max(s.length for s in segments) <= _FEW_QUERIES) == few
        and chip_of(q).capability // 10 in (9, 10)
    )


@adapter("indexer_scores", "DeepGEMM's paged index logits", "deep_gemm", partial(_takes, True))
def paged_logits(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor, segments: Segments, **_: Any
) -> torch.Tensor:
    """Queries of a sequence go in pairs where all sequences have an even number of them, the most that sm_90 takes."""
    library = import_module("deep_gemm")
    together = 2 if all(s.length % 2 == 0 for s in segments) else 1
    groups = q.shape[0] // together
    lengths = segments.visible.view(groups, together)
    if [s.sequence for s in segments] == list(range(groups)):
        tables = block_tables[:groups]
    else:
        tables = block_tables.index_select(0, segments.sequences[::together])
    schedule = library.get_paged_mqa_logits_metadata(lengths, _PAGE_SIZE, library.get_num_sms())
    return library.fp8_paged_mqa_logits(
        q.contiguous().view(groups, together, *q.shape[1:]), pool[:, :, None], weights.contiguous(), lengths, tables,
        schedule, segments.longest, clean_logits=False,
    )  # fmt: skip


@adapter("indexer_scores", "DeepGEMM's index logits", "deep_gemm", partial(_takes, False))
def gathered_logits(
    q: torch.Tensor, weights: torch.Tensor, pool: torch.Tensor, block_tables: torch.Tensor, segments: Segments, *,
    key_format: IndexKeyFormat, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """The keys of each sequence are gathered, 132 bytes each; a query's logits begin at its sequence's first key."""
    page_counts: dict[int, int] = {}
    for s in segments:
        page_counts[s.sequence] = max(page_counts.get(s.sequence, 0), cdiv(s.end, _PAGE_SIZE))
    pages = [block_tables[sequence, :count] for sequence, count in page_counts.items()]
    chosen = pages[0] if len(pages) == 1 else torch.cat(pages)
    keys, key_scales = key_format.views(pool)
    assert key_scales is not None
    gathered = keys.view(torch.uint8).index_select(0, chosen).view(q.dtype).view(-1, q.shape[2])
    scales = key_scales.index_select(0, chosen).flatten()
    if len(pages) == 1:
        first, last = torch.zeros_like(segments.visible), segments.visible
    else:
        first_key, total = [0] * block_tables.shape[0], 0
        for sequence, count in page_counts.items():
            first_key[sequence], total = total, total + count * _PAGE_SIZE
        first = upload(torch.tensor(first_key, dtype=torch.int32), q.device).index_select(0, segments.sequences)
        last = first + segments.visible
    return import_module("deep_gemm").fp8_mqa_logits(
        q.contiguous(), (gathered, scales), weights.contiguous(), first, last, clean_logits=False,
        max_seqlen_k=segments.longest,
    )  # fmt: skip
