"""Decode steps of requests whose pages are partly spilled, by hand: the same bits as with all pages resident; and the
tokens of an engine without hot rows, whose steps may be padded to other numbers of rows."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.startup import start
from dsa_engine.model.kv_cache import KVCache
from small_config import SMALL

PAGE, SPILLED, SETS = 8, 24, 4
OPTIONS: dict[str, Any] = {
    "device": "cpu", "max_model_len": 256, "page_size": PAGE, "progress": False, "enable_prefix_caching": False,
}  # fmt: skip
LENGTHS = ((70, 14), (58, 30), (120, 18), (40, 12), (66, 6), (90, 9))
LATER = 40.0  # in place of rows that have been spilled


class Spills:
    """Spills pages of the requests that decode: in a step their rows are elsewhere, by other lists of pages."""

    def __init__(self, cache: KVCache, num_drafts: int):
        self.cache, self.random, self._lookahead = cache, random.Random(1), 1 + 2 * num_drafts
        self.lists: dict[Request, tuple[Any, array[int]]] = {}  # the scheduler's list, and that with spilled pages
        self.sets: dict[Request, int] = {}
        self.free = [*range(cache.pages, cache.pages + cache.spilled)]
        self.count = 0

    def begin(self, requests: list[Request]) -> None:
        for request in [one for one in self.lists if one.finish_reason is not None or one not in requests]:
            self._leave(request)
        for request in requests:
            held, pages = self.lists.get(request, (None, array("i")))
            if held is not request.pages:  # it has been preempted since
                self._leave(request)
                pages = array("i")
            if request not in self.sets:
                self.sets[request] = self.random.choice([*{*range(SETS)} - {*self.sets.values()}])
            request.hot_set = self.sets[request]
            pages.extend(request.pages[len(pages) :])
            first = (request.num_computed_tokens - self._lookahead) // PAGE - 1  # that may be written again
            complete = [i for i in range(max(0, first)) if pages[i] < self.cache.pages]
            for i in self.random.sample(complete, min(len(complete), len(self.free), self.random.choice([0, 0, 1, 4]))):
                pages = array("i", pages)
                self._spill(pages[i], to := self.free.pop(self.random.randrange(len(self.free))))
                pages[i] = to
            self.lists[request] = request.pages, pages
            request.pages = pages

    def end(self) -> None:
        for request, (held, _) in self.lists.items():
            request.pages = held

    def _leave(self, request: Request) -> None:
        _, pages = self.lists.pop(request, (None, ()))
        self.free += [page for page in pages if page >= self.cache.pages]
        self.sets.pop(request, None)

    def _spill(self, page: int, to: int) -> None:
        cache = self.cache
        for latent, host, keys in zip(cache.latent, cache.host_latent, cache.index_keys, strict=True):
            host[to - cache.pages] = latent[page]
            latent[page] = LATER
            if keys is not None:
                keys[to], keys[page] = keys[page], LATER
        assert cache.hot is not None
        cache.hot.forget([to])
        self.count += 1


def spilling(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Spills:
    runner = llm.engine.runner
    spills, launch = Spills(runner.cache, runner.num_drafts), ModelRunner.launch

    def launched(self: ModelRunner, plan: Any, before: Any = None) -> Any:
        if self is not runner or plan.decode is None:
            return launch(self, plan, before)
        spills.begin([chunk.request for chunk in plan.own.chunks])
        try:
            return launch(self, plan, before)
        finally:
            spills.end()

    monkeypatch.setattr(ModelRunner, "launch", launched)
    return spills


CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "eager": {"enforce_eager": True},
    "fp8 caches": {"kv_cache_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "drafts": {"drafts": 2},
    "drafts that share a selection": {"drafts": 3, "model": "glm_moe_dsa", "index_share_for_mtp_iteration": True},
    "modules": {"drafts": 2, "modules": 2},
    "shared selections": {"model": "glm_moe_dsa", "index_topk_pattern": "FSSF"},
    "fixed forms": {"batch_invariant": True},
    "records": {"selection": 5},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n not in ("drafts", "shared selections"))) for n in CASES],
)
def test_the_same_bits_as_with_resident_pages(
    name: str,
    oracle: Callable[..., Any],
    drafting_oracle: Callable[..., Any],
    random_ids: Callable[..., list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = dict(CASES[name])
    drafts, model, modules = case.pop("drafts", 0), case.pop("model", "deepseek_v32"), case.pop("modules", 1)
    keys = {"index_topk": 16} | {key: case.pop(key) for key in [*case] if key.startswith("index_")}
    keys |= {"kv_lora_rank": 128, "index_head_dim": 64} if "kv_cache_dtype" in case else {}
    if drafts:
        folder = drafting_oracle(model, modules=modules, **keys).folder
        case["speculative_config"] = {"num_speculative_tokens": drafts}
    else:
        folder = oracle(model, num_hidden_layers=4 if "index_topk_pattern" in keys else 2, **keys).folder
    # With drafts the host has to see log-probabilities, and with records all: such steps run eagerly.
    how: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "selection": case.pop("selection", 0)}
    how |= {} if drafts else {"logprobs": 1}
    hot_rows = 16 * (1 if not drafts else 2 * drafts if modules > 1 else 1 + drafts)
    options = {"max_num_seqs": SETS} | OPTIONS | {"dtype": "float32"} | case
    prompts = [random_ids(n, seed=n) for n, _ in LENGTHS]
    params = [SamplingParams(max_tokens=n, **how) for _, n in LENGTHS]
    # The scheduler knows of none.
    monkeypatch.setattr(start, "KVCache", lambda *given: KVCache(*given[:6], SPILLED, SETS, hot_rows))
    with LLM(folder, **options) as llm:
        llm.engine.set_num_drafts(drafts)
        llm.generate(prompts, params)  # PyTorch's products of bfloat16 may round otherwise in the first prefill
        wanted, hot = llm.generate(prompts, params), llm.engine.cache.hot
        assert hot is not None and int(hot.of_set[..., 2:].sum()) == 0
        spills = spilling(llm, monkeypatch)
        for a, b in zip(llm.generate(prompts, params), wanted, strict=True):
            assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)
            if how["selection"]:
                assert a.selection is not None and b.selection is not None
                assert (a.selection.positions == b.selection.positions).all()
                assert (a.selection.weights == b.selection.weights).all()
        asked, misses = hot.of_set[..., 2:].sum((0, 1)).tolist()
        assert spills.count > 20 and asked > misses > 0
        eager = name in ("eager", "fp8 caches", "fixed forms", "records")
        assert eager or (llm.engine.graphs is not None and llm.engine.graphs.captured)
    monkeypatch.undo()
    with LLM(folder, **options) as llm:
        llm.engine.set_num_drafts(drafts)
        assert [out.token_ids for out in llm.generate(prompts, params)] == [out.token_ids for out in wanted]


@pytest.mark.parametrize("tokens", [600, pytest.param(6_000, marks=pytest.mark.slow)])
def test_four_requests_where_one_and_a_half_fit(tokens: int, tmp_path: Path) -> None:
    """All run at once, none is preempted, and all answer as where all rows are on the device."""
    sizes = {"vocab_size": 204, "num_attention_heads": 4, "num_hidden_layers": 2, "kv_lora_rank": 128}
    (tmp_path / "config.json").write_text(json.dumps(SMALL | sizes | {"max_position_embeddings": 8192}))
    rng = random.Random(tokens)
    prompts = [[rng.randrange(200) for _ in range(tokens - 20)] for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    options = OPTIONS | {"max_model_len": tokens, "load_format": "dummy", "dtype": "float32", "max_num_seqs": 4}
    options |= {"page_size": 4, "enable_prefix_caching": True}
    with LLM(tmp_path, **options) as llm:
        wanted, row_bytes = llm.generate(prompts, params), llm.engine.cache.page_bytes // 4
    few = options | {"cache_memory": 3 * tokens // 2 * row_bytes}
    with LLM(tmp_path, **few) as llm:
        assert llm.generate(prompts[:1], params)[0].token_ids == wanted[0].token_ids
        assert llm.engine.cache.pages * 4 < 1.51 * tokens
    with LLM(tmp_path, **few, hot_rows=16, host_cache_memory=4 * tokens * row_bytes) as llm:
        scheduler, counts = llm.engine.scheduler, list[int]()
        llm.engine.runner.hooks.append(lambda plan: counts.append(len(plan.own.chunks) * plan.decodes))
        assert [out.token_ids for out in llm.generate(prompts, params)] == [out.token_ids for out in wanted]
        assert max(counts) == 4 and scheduler.preemptions == 0
        cache = llm.engine.cache
        assert cache.hot is not None and int(cache.hot.of_set[..., 3].sum()) > 0
        assert cache.bytes + cache.hot.device_bytes < 1.01 * few["cache_memory"]
