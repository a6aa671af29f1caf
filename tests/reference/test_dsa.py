"""The engine on one page, ``dsa_engine/reference/dsa.py``: logits of ``transformers``, tokens of the engine."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.reference import dsa
from oracles import CASES, in_float64, make_ids

PAGE = Path(dsa.__file__)
PROMPTS = [make_ids(length, 700, seed=length) for length in (300, 5, 411)]


def test_is_one_page_that_needs_nothing_of_ours() -> None:
    """900 lines; torch, safetensors and Python. Only the command line, which takes text, needs a tokenizer."""
    source = PAGE.read_text()
    assert len(source.splitlines()) <= 900
    for node in ast.parse(source).body:
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= {*sys.stdlib_module_names, "torch", "safetensors"}


@pytest.mark.parametrize(
    "name", ["v32-small-selection", "v32-tied", "v32-yarn-long", "glm-shared", "glm-pattern", "v3"]
)
def test_logits_of_transformers(
    name: str, oracle: Callable[..., Any], assert_same_logits: Callable[..., None], tmp_path: Path
) -> None:
    model_type, overrides, length = CASES[name]
    made, ids = oracle(model_type, **overrides), make_ids(length)
    ours = dsa.load(made.folder, torch.float32, page_size=13, chunk=250).logits(ids)
    assert_same_logits(ours, made.logits(ids), index_topk=made.index_topk, what=name)


@pytest.mark.parametrize("name", ["v32", "glm", "v3-one-group"])
def test_logits_in_float64(name: str, oracle: Callable[..., Any]) -> None:
    """Where rounding decides no selection. (The router of ``transformers`` stays in float32.)"""
    model_type, overrides, length = CASES[name]
    made, ids = oracle(model_type, **overrides), make_ids(length)
    ours = dsa.load(made.folder, torch.float64).logits(ids)
    with torch.no_grad():
        theirs = in_float64(made.model)(torch.tensor([ids]), use_cache=False).logits[0]
    error = (ours - theirs).abs().amax(-1) / theirs.abs().amax(-1)
    print(f"{name}: median {error.median():.1e}, maximum {error.max():.1e}")
    assert ours.dtype == torch.float64
    assert error.median() < 1e-6 and (error > 1e-4).float().mean() < 0.01


@pytest.fixture(scope="module")
def engine() -> dsa.Engine:
    return dsa.load("demo", torch.float32, page_size=16, chunk=100)


@pytest.fixture(scope="module")
def llm(demo_cache: Path) -> LLM:
    return LLM("demo", device="cpu", dtype="float32", max_model_len=1024, cache_memory="64MiB", progress=False)


def tokens_of(llm: LLM, prompts: list[list[int]] = PROMPTS, **params: Any) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, SamplingParams(**params))]


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 7}, {"temperature": 0.8, "seed": 1, "top_k": 40, "top_p": 0.9}]
)
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_tokens_of_the_engine(engine: dsa.Engine, llm: LLM, params: dict[str, Any], drafts: int) -> None:
    ours = engine.generate(PROMPTS, max_tokens=40, drafts=drafts, **params)
    assert ours == tokens_of(llm, max_tokens=40, **{"temperature": 0.0} | params)
    assert not engine.scheduler.requests and all(not any(pages.holders) for pages in engine.scheduler.pages)


def test_drafts_save_steps(engine: dsa.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    step = dsa.Engine.step
    monkeypatch.setattr(dsa.Engine, "step", lambda self: (steps.append(1), step(self))[1])
    counts = []
    for drafts in (0, 3):
        steps.clear()
        engine.generate([PROMPTS[0][:50]], max_tokens=60, drafts=drafts)
        counts.append(len(steps))
    assert counts[1] < 0.8 * counts[0]


def test_a_known_beginning_is_not_computed_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, computed = dsa.load("demo", torch.float32, page_size=16, chunk=100), []
    forward = dsa.Model.forward
    monkeypatch.setattr(
        dsa.Model, "forward", lambda self, ids, batch: (computed.append(len(ids)), forward(self, ids, batch))[1]
    )
    for drafts in (0, 2):
        first, longer = PROMPTS[0], PROMPTS[0][:200] + PROMPTS[2][:100]
        engine.generate([first], 1, drafts=drafts)
        computed.clear()
        assert engine.generate([longer, first], 20, drafts=drafts) == tokens_of(
            llm, [longer, first], temperature=0, max_tokens=20
        )
        assert computed[0] == 100 and sum(computed[:2]) == (300 - 192) + (300 - 288)


@pytest.mark.parametrize("drafts", [0, 2])
def test_preemption(llm: LLM, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of up to 480 tokens in caches of 40 pages, 640 tokens."""
    engine, preempted = dsa.load("demo", torch.float32, pages=40, page_size=16, chunk=100), []
    release = dsa.Scheduler.release

    def count(self: dsa.Scheduler, request: dsa.Request, keep: int | None = None) -> None:
        preempted.extend([request.number] * (request.state == "decode" and keep is None))
        release(self, request, keep)

    monkeypatch.setattr(dsa.Scheduler, "release", count)
    prompts = [make_ids(190, 700, seed=seed) for seed in range(3)]
    ours = engine.generate(prompts, 60, temperature=1.0, seed=3, drafts=drafts)
    assert preempted and ours == tokens_of(llm, prompts, max_tokens=60, temperature=1.0, seed=3)


def test_an_error_leaves_nothing(llm: LLM) -> None:
    """Neither requests nor pages, so that later calls are right."""
    engine = dsa.load("demo", torch.float32, pages=40, page_size=16, chunk=100)
    for call in (lambda: engine.generate([PROMPTS[1], [10**6]]), lambda: engine.logits([10**6])):
        with pytest.raises(IndexError):
            call()
    with pytest.raises(ValueError, match="900 tokens need 57 pages of 16; there are 40"):
        engine.logits([5] * 900)
    assert not engine.scheduler.requests and engine.scheduler.pages[0].available == 40
    tokens = tokens_of(llm, [PROMPTS[1]], temperature=1.0, top_p=1e-9, max_tokens=8)
    assert engine.generate([PROMPTS[1]], 8, temperature=1.0, top_p=1e-9) == engine.generate([PROMPTS[1]], 8) == tokens


def test_errors(engine: dsa.Engine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="100300 tokens need 6269 pages of 16; there are 1024"):
        engine.generate([PROMPTS[0]], max_tokens=100_000)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(ValueError, match="'llama'.*deepseek_v32"):
        dsa.load(tmp_path)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_pages_on_several_ranks(size: int) -> None:
    """The same as of all tokens on one: with scores that tie, ranks that hold nothing, and rows that see a page's part,
    fewer than k tokens or none on most ranks."""
    g, page, count, topk = torch.Generator().manual_seed(size), 4, 75, 12
    rows, keys = torch.randn(count, 20, generator=g).double(), torch.randint(-1, 2, (count, 6), generator=g).double()
    positions = torch.tensor([74, 73, 40, 11, 3, 0])
    q = torch.randn(len(positions), 2, 20, generator=g).double()
    index = torch.randint(-1, 2, (6, 3, 6), generator=g).double(), torch.randint(0, 3, (6, 3), generator=g).double()
    chosen = dsa.select(*index, keys, positions, topk)
    wanted, _ = dsa.attend(q, rows, positions, chosen, 16, 0.3)
    owners = torch.randint(size, (count // page + 1,), generator=g).repeat_interleave(page)[:count]
    held = [(owners == rank).nonzero().flatten() for rank in range(size)]
    parts = [(rows[some], keys[some], some) for some in held]
    torch.testing.assert_close(dsa.attend_across_ranks(q, index, parts, positions, topk, 16, 0.3), wanted)
