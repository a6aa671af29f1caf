"""The engine with FP8 caches: its logits are those of ``transformers`` in float64 with the same quantisation put into
it naively, and its tokens depend on nothing but the request."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from caches import hadamard_matrix
from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.startup import start
from dsa_engine.kernels.formats.cache_format import FP8
from dsa_engine.kernels.indexer.lightning_indexer import lightning_indexer
from dsa_engine.kernels.rows.segment import Segments
from dsa_engine.model import attention, indexer
from oracles import in_float64, index_vectors

# Sizes that the format holds: a latent block and an index key of a power of two.
SIZES = {"kv_lora_rank": 128, "index_head_dim": 64}


def fp8(x: torch.Tensor) -> torch.Tensor:
    """``x [..., n · 128 or less]``, float64, as FP8 caches hold it, by the released definition; scales are not powers
    of two in a checkpoint that does not ask for it."""
    blocks = x.unflatten(-1, (-1, min(128, x.shape[-1])))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) * float(torch.tensor(1 / 448))
    return ((blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    return x @ hadamard_matrix(x.shape[-1]) * x.shape[-1] ** -0.5


class Selections:
    """What the engine's layers select of one prompt, position by position, and what the naive formulation would."""

    def __init__(self, layers: int, length: int, topk: int):
        self.layers, self.topk, self.calls = layers, topk, 0
        self.of_engine = torch.full((layers, length, topk), -1)
        self.different: list[float] = []  # fraction of rows, a layer each

    def watched(self, q: Any, weights: Any, pool: Any, tables: Any, segments: Any, k: int, **how: Any) -> torch.Tensor:
        """``lightning_indexer``, called once a layer of each chunk that has rows which select."""
        slots, size = lightning_indexer(q, weights, pool, tables, segments, k, **how), pool.shape[1]
        pages = torch.empty(int(tables.max()) + 1, dtype=torch.int64)
        pages[tables[0].long()] = torch.arange(tables.shape[1])
        rows = segments.visible.long() - 1
        self.of_engine[self.calls % self.layers, rows] = pages[slots.long() // size] * size + slots.long() % size
        self.calls += 1
        return slots

    def index(
        self, indexer: Any, x: torch.Tensor, q_resid: torch.Tensor, turns: Any, *_: Any, **__: Any
    ) -> torch.Tensor:
        """``DeepseekV32Indexer.forward`` of one sequence, with queries and keys transformed and quantised: it compares
        what it would select with the engine's selection, and gives that."""
        q, k, weights = index_vectors(indexer, x, q_resid, turns)
        products = torch.einsum("thd,sd->ths", fp8(hadamard(q)), fp8(hadamard(k))).relu()
        scores = torch.einsum("ths,th->ts", products, weights)
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        own, theirs = scores.topk(self.topk, dim=-1).indices, self.of_engine[len(self.different)]
        chosen = theirs[:, 0] >= 0
        self.different.append(float((own.sort().values != theirs.sort().values)[chosen].any(-1).float().mean()))
        assert chosen.tolist() == [position >= self.topk for position in range(len(own))]
        return own.where(~chosen[:, None], theirs).int()[None]


def quantised(model: Any, patch: pytest.MonkeyPatch, selections: Selections) -> Any:
    """A float64 copy of the model that attends to what FP8 caches hold, and to the rows that the engine selects."""
    naive = in_float64(model)
    module = sys.modules[type(model).__module__]
    for name, part in naive.named_modules():
        if name.endswith("kv_a_layernorm"):
            part.register_forward_hook(lambda _, __, out: fp8(out))
        elif name.endswith("indexer"):
            part.forward = functools.partial(selections.index, part)
    original = module.apply_rotary_pos_emb_interleave

    def rounded(q: torch.Tensor, k: torch.Tensor, *turns: Any, **options: Any) -> Any:
        q, k = original(q, k, *turns, **options)
        return q, k.bfloat16().to(k.dtype)

    patch.setattr(module, "apply_rotary_pos_emb_interleave", rounded)
    return naive


def load(folder: Path | str, **options: Any) -> LLM:
    defaults = {"device": "cpu", "kv_cache_dtype": "fp8", "cache_memory": "32MiB", "progress": False}
    return LLM(folder, **(defaults | options))


@pytest.mark.parametrize(
    "model_type, options",
    [
        ("deepseek_v32", {}),
        ("deepseek_v32", {"max_num_batched_tokens": 97, "workspace": "64KiB", "page_size": 7}),
        ("deepseek_v3", {}),
        ("deepseek_v3", {"max_num_batched_tokens": 41, "workspace": "64KiB"}),
    ],
)
def test_logits_of_a_naive_formulation(
    model_type: str, options: dict[str, Any], oracle: Callable[..., Any], random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """With the same selection. A code beside a tie may be rounded to either side, so that on some processors a row
    selects another token; that is counted apart."""
    made = oracle(model_type, **SIZES)
    ids = random_ids(300)
    selections = Selections(made.model.config.num_hidden_layers, len(ids), made.index_topk or 0)
    llm = load(made.folder, **options)
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(indexer, "lightning_indexer", selections.watched)
        got = llm.prompt_logits(ids)
        wanted = quantised(made.model, patch, selections)(torch.tensor([ids]), use_cache=False).logits[0]
    whole = float((got - wanted).norm() / wanted.norm())
    rows = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    unquantised = float((made.logits(ids) - wanted).norm() / wanted.norm())
    print(f"whole {whole:.1e}, rows {rows.median():.1e} to {rows.max():.1e}, without quantisation {unquantised:.1e}")
    print(f"other selections: {selections.different}")
    assert whole < 1e-3
    assert len(selections.different) == (3 if made.index_topk else 0) and max(selections.different, default=0) < 0.02
    assert unquantised > 0.01


def test_rows_expanded_once_a_layer(
    oracle: Callable[..., Any], random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill over rows that were expanded before gives the bits of prefill over coded rows."""
    folder, (long, *prompts) = (
        oracle("deepseek_v32", **SIZES).folder,
        [random_ids(n, seed=n) for n in (250, 90, 100, 30)],
    )
    sequences: list[int] = []

    def pays(q: Any, slots: Any, segments: Segments, *_: Any) -> bool:
        sequences.append(len(segments.contexts))
        return expanded

    def results() -> tuple[torch.Tensor, list[list[int]]]:
        llm = load(folder, kernels="reference", max_num_batched_tokens=200, page_size=7)
        return llm.prompt_logits(long), [out.token_ids for out in llm.generate(prompts, GREEDY)]

    monkeypatch.setattr(attention, "pays", pays)
    expanded = False
    logits, tokens = results()
    expanded = True
    again, tokens_again = results()
    assert torch.equal(logits, again) and tokens == tokens_again and max(sequences) > 1


LENGTHS = [70, 66, 64, 5, 30, 3, 60]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def model(oracle: Callable[..., Any]) -> Any:
    return oracle("deepseek_v32", **SIZES)


def test_tokens_depend_on_the_request_alone(model: Any, random_ids: Callable[..., list[int]]) -> None:
    """Not on the batch, the chunks of its prefill, the pages, or a preemption."""
    prompts = [random_ids(n, seed=i) for i, n in enumerate(LENGTHS)]
    llm = load(model.folder)
    alone = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == alone
    token = 3 * (128 + 4 + 2 * 8 + 64 + 4)  # bytes in the caches of 3 layers
    small = {"page_size": 2, "max_num_batched_tokens": 24, "max_model_len": 128, "cache_memory": 90 * 2 * token}
    llm = load(model.folder, **small)
    assert llm.engine.cache.pages == 90
    assert [out.token_ids for out in llm.generate(prompts, GREEDY)] == alone
    assert llm.engine.scheduler.preemptions > 0


def test_drafts_change_no_token() -> None:
    """Speculative decoding over FP8 caches, the module's own layer included; the prompt is longer than index_topk."""
    text = Path(__file__).read_text()
    tokens = []
    for config in ({}, {"speculative_config": {"num_speculative_tokens": 2}}):
        llm = load("demo", max_model_len=1024, **config)
        (out,) = llm.generate([llm.tokenizer.encode(text)[:400]], GREEDY)
        tokens.append(out.token_ids)
    assert len(llm.engine.cache.latent) == 4
    assert tokens[0] == tokens[1]


def test_sizes_that_the_format_cannot_hold_are_refused_before_anything_loads(
    oracle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "load_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"kv_lora_rank 32.*a multiple of 128, not 32; use kv_cache_dtype='auto'"):
        load(oracle("deepseek_v32").folder, hf_overrides={"index_head_dim": 64})
    with pytest.raises(ValueError, match=r"index_head_dim 24\).*a power of two, at most 128, not 24; use"):
        load(oracle("deepseek_v32").folder, hf_overrides={"kv_lora_rank": 128})
    with pytest.raises(ValueError, match="kv_cache_dtype='bfloat16' needs an engine that computes in bfloat16"):
        load(oracle("deepseek_v32").folder, kv_cache_dtype="bfloat16")
    with pytest.raises(
        ValueError, match="kv_cache_dtype must be one of auto, bfloat16, fp8, fp8_e4m3, fp8_ds_mla, not 'fp4'"
    ):
        load(oracle("deepseek_v32").folder, kv_cache_dtype="fp4")


def test_pools_and_what_they_take(model: Any) -> None:
    """The same memory holds as many more tokens as their rows are smaller."""
    plain, fp8 = (load(model.folder, kv_cache_dtype=name, max_num_seqs=1000).engine for name in ("auto", "fp8"))
    assert {pool.dtype for pool in [*fp8.cache.latent, *fp8.cache.index_keys]} == {torch.uint8}
    bytes_of = [sum(pool.nbytes for pool in [*e.cache.latent, *e.cache.index_keys]) for e in (plain, fp8)]
    page = 64 * 3 * (128 + 4 + 2 * 8 + 64 + 4)
    assert (32 << 20) - page < bytes_of[1] <= 32 << 20
    assert fp8.cache.pages == (32 << 20) // page
    assert plain.cache.pages == (32 << 20) // (64 * 3 * 4 * (128 + 8 + 64)) and plain.cache.format.latent.dtype != FP8
    bf16 = load(model.folder, kv_cache_dtype="bfloat16", dtype="bfloat16").engine
    assert {pool.dtype for pool in bf16.cache.latent} == {torch.bfloat16}
