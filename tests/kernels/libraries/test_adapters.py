"""Adapters of other libraries: the calls that their released signatures take, and the numbers that come back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import dsa_engine.kernels.libraries
from dsa_engine.kernels.attention.dense_attention import dense_attention
from dsa_engine.kernels.attention.sparse_attention import sparse_attention
from dsa_engine.kernels.formats.cache_format import FP8, index_key_format, latent_format
from dsa_engine.kernels.formats.fp8 import quantize_blocks
from dsa_engine.kernels.formats.quantize import quantize_tokens
from dsa_engine.kernels.grouped.grouped_matmul_fp8 import block_fp8
from dsa_engine.kernels.indexer.indexer_scores import indexer_scores
from dsa_engine.kernels.linear.block_scaled_matmul import block_scaled_linear
from dsa_engine.kernels.moe.expert_mlp import expert_mlp
from dsa_engine.kernels.rows.segment import CuSeqlens, Segment, Segments
from dsa_engine.kernels.runtime import launch
from dsa_engine.kernels.runtime.difference import differences
from dsa_engine.kernels.runtime.libraries import ADAPTERS
from dsa_engine.kernels.runtime.operation import OPERATIONS
from library_stubs import install

assert dsa_engine.kernels.libraries.__all__
BF16 = torch.bfloat16
Case = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@pytest.fixture(autouse=True)
def stubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    with launch.references():
        yield install(monkeypatch, "flash_mla", "deep_gemm", "flash_attn", "flash_attn_interface")


def _sparse(dtype: torch.dtype, tokens: int, heads: int, workspace: int = 256 << 20) -> Case:
    g = torch.Generator().manual_seed(tokens)
    kind = latent_format(512, 64, dtype)
    slots = torch.randint(-40, 320, (tokens, 128), generator=g, dtype=torch.int32).clamp_(min=-1)
    slots[-1] = -1  # a query that sees nothing, as padding of a graph
    q = torch.randn(tokens, heads, 576, generator=g).to(BF16)
    how = {"row_format": kind, "scale": 576**-0.5, "workspace": workspace}
    return sparse_attention, (q, kind.random_pages(5, 64, g), slots), how


def _scores(segments: list[Segment], tables: list[list[int]], heads: int) -> Case:
    g = torch.Generator().manual_seed(1)
    kind, of = index_key_format(128, FP8), Segments.of(segments, "cpu")
    q = torch.randn(of.rows, heads, 128, generator=g).to(FP8)
    pool = kind.random_pages(8, 64, g)
    table = torch.tensor(tables, dtype=torch.int32)
    return indexer_scores, (q, torch.randn(of.rows, heads, generator=g), pool, table, of), {"key_format": kind}


def _experts(tokens: int, first: int | None, words: bool, local_pairs: int | None) -> Case:
    g = torch.Generator().manual_seed(2)
    count, hidden, inner = 6, 512, 256

    def blocks(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            quantize_blocks(torch.randn(shape[-2:], generator=g), (128, 128)) for _ in range(math.prod(shape[:-2]))
        ]
        codes, scales = (torch.stack(each) for each in zip(*parts, strict=True))
        return codes.view(shape), scales.view(*shape[:-2], *scales.shape[1:])

    gate_up, down = blocks(count, 2, inner, hidden), blocks(count, hidden, inner)
    x = torch.randn(tokens, hidden, generator=g).to(BF16)
    ids = torch.stack([torch.randperm(8 if first else 5, generator=g)[:3] for _ in range(tokens)]).int()
    if local_pairs is not None:
        local_pairs = int(((ids >= (first or 0)) & (ids < (first or 0) + count)).sum())
    given = quantize_tokens(x, False) if words else x, ids, torch.rand(tokens, 3, generator=g), gate_up, down
    how = {"dtype": BF16, "first": first, "local_pairs": local_pairs}
    return expert_mlp, (*given, block_fp8(False, hidden)), how


def _dense(key: int, value: int, dtype: torch.dtype = BF16) -> Case:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, 4, size, generator=g).to(dtype) for n, size in ((90, key), (150, key), (150, value)))
    out = torch.empty(90, 8, value, dtype=dtype)[:, 2:6]
    return dense_attention, (q, k, v, CuSeqlens.of([30, 60]), CuSeqlens.of([50, 100])), {"scale": 0.1, "out": out}


def _linear(rows: int) -> Case:
    g = torch.Generator().manual_seed(4)
    weight = quantize_blocks(torch.randn(256, 1024, generator=g), (128, 128))
    return block_scaled_linear, (torch.randn(rows, 1024, generator=g).to(BF16), *weight), {"power_of_two": True}


CASES: dict[str, tuple[str, Case]] = {
    "prefill": ("FlashMLA's sparse prefill", _sparse(BF16, 70, 128)),
    "prefill, 64 heads": ("FlashMLA's sparse prefill", _sparse(BF16, 3, 64)),
    "decode": ("FlashMLA's sparse decode", _sparse(FP8, 4, 128)),
    "decode, in pieces": ("FlashMLA's sparse decode", _sparse(FP8, 9, 64, workspace=8 * 4 * 64 * 512)),
    "logits, a prompt": ("DeepGEMM's index logits", _scores([Segment(0, 70, 0, 130)], [[5, 1, 7, 2]], 64)),
    "logits, two prompts": (
        "DeepGEMM's index logits",
        _scores([Segment(0, 20, 1, 0), Segment(20, 40, 0, 90), Segment(60, 9, 1, 150)], [[5, 1, 7], [0, 3, 6]], 32),
    ),
    "paged": (
        "DeepGEMM's paged index logits",
        _scores([Segment(0, 1, 0, 9), Segment(1, 1, 1, 140)], [[5, 1, 7], [0, 3, 6]], 64),
    ),
    "paged, drafts": (
        "DeepGEMM's paged index logits",
        _scores([Segment(0, 4, 1, 9), Segment(4, 2, 0, 140)], [[5, 1, 7], [0, 3, 6]], 64),
    ),
    "paged, odd": ("DeepGEMM's paged index logits", _scores([Segment(0, 3, 1, 9)], [[5, 1, 7], [0, 3, 6]], 64)),
    "experts": ("DeepGEMM's grouped experts", _experts(100, None, False, None)),
    "experts, counted words": ("DeepGEMM's grouped experts", _experts(300, 2, True, 0)),
    "masked": ("DeepGEMM's masked experts", _experts(20, None, True, None)),
    "masked, some": ("DeepGEMM's masked experts", _experts(5, 2, False, None)),
    "flash 2": ("FlashAttention-2", _dense(192, 128)),
    "flash 3": ("FlashAttention-3", _dense(192, 128)),
    "flash 3, widened": ("FlashAttention-3", _dense(96, 64, torch.float16)),
    "linear": ("DeepGEMM's FP8 products", _linear(70)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_numbers(name: str, stubs: list[Any], relative_error: Callable[..., float]) -> None:
    """The stub takes the call, and what the adapter makes of its result is the operation's."""
    adapter, (operation, args, how) = CASES[name]
    library = ADAPTERS[adapter]
    assert library.operation == operation.__name__ and library.takes(*args, **how)
    wanted = OPERATIONS[library.operation].run(*args, **how)
    wanted = [each.clone() for each in (wanted if isinstance(wanted, tuple) else (wanted,))]
    ours = library.run(*args, **how)
    assert stubs, "the library is called"
    for mine, theirs in zip(ours if isinstance(ours, tuple) else (ours,), wanted, strict=True):
        if library.operation == "indexer_scores":
            seen = torch.arange(mine.shape[1]) < args[4].visible[:, None]
            assert mine.stride(1) == 1
            mine, theirs = mine[seen], theirs[seen]
        infinite = theirs.isinf()
        assert torch.equal(mine.isneginf(), theirs.isneginf()) and mine.dtype == theirs.dtype
        # Experts round what is between their products to bfloat16, which another code of e4m3 may follow.
        bound = 3e-2 if "experts" in adapter else 6e-3
        assert relative_error(mine[~infinite], theirs[~infinite]) < bound
        for error, allowed in differences(mine, theirs):
            assert error <= allowed * library.allowance, "the check of a first start leaves it out"


def test_schedules_of_decode(stubs: list[Any]) -> None:
    """Those of pages of another size are others, and one of many tokens would not fit into shared memory."""
    _, (_, (q, pool, slots), how) = CASES["decode"]
    run = ADAPTERS["FlashMLA's sparse decode"].run
    for size in (64, 32):
        run(q, pool.view(-1, size, pool.shape[2]), slots, **how)
    stubs.clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        run(
            q[:1].repeat(12_000, 1, 1),
            torch.empty_like(pool),
            slots[:1].repeat(12_000, 1),
            **how | {"workspace": 1 << 40},
        )
    assert [args[0].shape[0] for _, args, _ in stubs] == [8192, 3808]


def test_another_form_is_not_taken() -> None:
    for name, changes in (
        ("prefill", {"counts": torch.zeros(70, dtype=torch.int32)}),
        ("decode", {"row_format": latent_format(512, 64, torch.float16)}),
        ("experts", {"dtype": torch.float32}),
        ("experts", {"local_fraction": 0.1, "local_pairs": None}),
    ):
        adapter, (_, args, how) = CASES[name]
        if "local_fraction" in changes:  # many pairs, of which the host does not know how many are local
            args = (args[0], *(x.repeat(60, 1) for x in args[1:3]), *args[3:])
        assert ADAPTERS[adapter].takes(*args, **how) or "local_fraction" in changes
        assert not ADAPTERS[adapter].takes(*args, **how | changes)
    _, (_, (q, pool, slots), how) = CASES["prefill"]
    assert not ADAPTERS["FlashMLA's sparse prefill"].takes(q[:, :32], pool, slots, **how)
    assert not ADAPTERS["FlashMLA's sparse prefill"].takes(q, pool, slots[:, :100], **how)
    with launch.compiling_for(80):
        assert not any(
            ADAPTERS[adapter].takes(*args, **how)
            for adapter, (_, args, how) in CASES.values()
            if "Flash" not in adapter and "products" not in adapter
        )
    with launch.compiling_for(100):  # DeepGEMM would end the process's use of the device
        _, (_, args, how) = CASES["linear"]
        take = ADAPTERS["DeepGEMM's FP8 products"].takes
        assert not take(*args, **how) and take(*args, **how, weight_power_of_two=True)
        assert not take(args[0], *args[1:], weight_power_of_two=True)
