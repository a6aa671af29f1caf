"""Decode in padded steps of static shape, as CUDA graphs replay them, and with several rows a request: same tokens.

On a GPU the graphs are captured, with the CPU's kernels the steps are recorded. Under ``TRITON_INTERPRET=1``, and on a
CPU without kernels, the same padded steps run kernel by kernel.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from fake_cuda import FakeDevice

CUDA = torch.cuda.is_available() and not INTERPRETED
CAPTURES = CUDA or (not INTERPRETED and cpu.library() is not None)
KERNELS = pytest.mark.skipif(not (CUDA or INTERPRETED), reason="needs kernels: a GPU, or TRITON_INTERPRET=1")


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_capture_is_ended_before_anything_else(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt waits for its end; another error is raised as it is, not as that of streams that have not joined."""
    before, finished = signal.signal(signal.SIGINT, signal.default_int_handler), []

    def function() -> torch.Tensor:
        if device.capturing:
            if error is not KeyboardInterrupt:
                raise error("CUDA out of memory")
            signal.raise_signal(signal.SIGINT)
        finished.append(device.capturing)
        return torch.empty(1, device="cuda")

    def end(graph: Any) -> None:
        device.end_capture(None)
        if error is not KeyboardInterrupt:
            raise RuntimeError("CUDA error: capturing has streams that have not joined")

    try:
        with FakeDevice() as device:
            monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", end)
            mesh = SimpleNamespace(device=torch.device("cuda:0"))
            model: Any = SimpleNamespace(runtime=SimpleNamespace(mesh=mesh), loads=None)
            nothing: Any = None
            graphs = DecodeGraphs(model, nothing)
            with pytest.raises(error):
                graphs.run("a step", function)
            assert finished == ([False, True] if error is KeyboardInterrupt else [False]) and not device.capturing
            assert not graphs.captured and not graphs.ready("a step")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "model_type, ahead",
    [
        pytest.param("deepseek_v32", False, marks=pytest.mark.slow),
        ("deepseek_v32", True),
        pytest.param("deepseek_v3", True, marks=[pytest.mark.slow, KERNELS]),
    ],
)
def test_padded_steps(
    model_type: str, ahead: bool, oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Three sequences in a bucket of four: one selects, one begins to select while it decodes, one sees few tokens."""
    model = oracle(model_type, num_hidden_layers=2)
    prompts = [random_ids(70), random_ids(62, seed=1), random_ids(3, seed=2)]
    llm = LLM(
        model.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        max_model_len=128,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
    )
    engine = llm.engine
    engine.async_scheduling = ahead
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    steps, before = [], []

    class Counted(DecodeGraphs):
        def forward(self, step: Any, sampled: torch.Tensor | None) -> Any:
            steps.append([sum(s.length for s in step.own.segments)])
            before.append(sampled is not None)
            return super().forward(step, sampled)

    engine.runner.graphs = Counted(engine.model, engine.cache, capture=CAPTURES, contexts=ContextBuckets(fewest=64))
    padded = [o.token_ids for o in llm.generate(prompts, params)]
    assert padded == [model.greedy(prompt, 5) for prompt in prompts]
    assert steps == [[3]] * 4  # the first token comes with the prefill
    # The first one is captured, and the step in flight is read before.
    assert before == [ahead and not CAPTURES, ahead, ahead, ahead]
    if CAPTURES:
        assert engine.runner.graphs.captured == [(4, 128)] and engine.runner.graphs.memory_bytes > 0


@KERNELS
def test_padded_steps_over_fp8_caches(oracle: Callable[..., Any], random_ids: Callable[..., list[int]]) -> None:
    """One sequence selects, one begins to select while it decodes."""
    model = oracle("deepseek_v32", num_hidden_layers=1, index_topk=16, kv_lora_rank=128, index_head_dim=16)
    llm = LLM(
        model.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        kv_cache_dtype="fp8",
        max_model_len=32,
        page_size=16,
        cache_memory="2MiB",
        enforce_eager=True,
    )
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    prompts = [random_ids(20), random_ids(15, seed=1)]
    plain = [out.token_ids for out in llm.generate(prompts, params)]
    engine.runner.graphs = DecodeGraphs(
        engine.model, engine.cache, capture=CAPTURES, contexts=ContextBuckets(fewest=32)
    )
    assert [out.token_ids for out in llm.generate(prompts, params)] == plain
    # Index scores beyond float32 end a request as it begins to select.
    indexer = engine.model.layers[0].attention.indexer
    with torch.inference_mode():
        indexer.weights_proj.matrix.fill_(3e38)
        indexer.weights_loaded()
    (out,) = llm.generate(prompts[1], params)
    assert out.finish_reason == "error"
    assert out.token_ids in (plain[1][:1], plain[1][:2])  # with a score of -inf a padded step cannot take all tokens


PAGE = 16
CONTEXTS = (3, 62, 70)  # tokens in the cache before the step: below index_topk 64, up to it and across it, beyond it
MAX_ROWS = 4  # rows of a request in a step


class Rows:
    """Runs chunks of known tokens on an engine without its scheduler: each request has other pages."""

    def __init__(self, llm: LLM, requests: list[list[int]], *, padded: bool):
        engine = llm.engine
        graphs = DecodeGraphs(engine.model, engine.cache, capture=CAPTURES, contexts=ContextBuckets(fewest=64))
        self.runner = ModelRunner(engine.model, engine.cache, graphs if padded else None)
        self.config = engine.config
        each = -(-max(len(ids) for ids in requests) // PAGE)
        self.requests = [
            Request(i, ids, SamplingParams(), pages=list(range(i * each, (i + 1) * each)))
            for i, ids in enumerate(requests)
        ]

    @torch.inference_mode()
    def step(self, counts: list[int], decodes: bool = True) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Computes ``counts[i]`` tokens of request i: hidden states ``[count, hidden]``, logits ``[count, vocab]``."""
        chunks = [
            Chunk(request, request.num_computed_tokens, count, range(1), num_logits=count)
            for request, count in zip(self.requests, counts, strict=True)
            if count
        ]
        plan = StepPlan.of(chunks, 0, 1, self.config, max_decode_rows=MAX_ROWS)
        assert plan.decodes == decodes
        if decodes and self.runner.graphs is not None:
            plan = plan.padded(self.config, self.runner.graphs.contexts)
        _, hidden = self.runner.forward(plan)
        wanted = plan.own.wanted
        assert [request for request, *_ in wanted] == [c.request for c in chunks for _ in range(c.length)]
        logits = self.runner.sampled_logits(plan, hidden)
        hidden = hidden[plan.own.rows_with_logits].clone()
        for chunk in chunks:
            chunk.request.num_computed_tokens = chunk.end
        sizes = [chunk.length for chunk in chunks]
        return list(zip(hidden.split(sizes), logits.split(sizes), strict=True))

    def rewind(self, counts: list[int]) -> None:
        for request, count in zip(self.requests, counts, strict=True):
            request.num_computed_tokens -= count


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs().amax(dim=-1) < 1e-4 * one.abs().amax(dim=-1)).all())


REFERENCES = pytest.mark.skipif(INTERPRETED, reason="slow in the interpreter")


@pytest.mark.parametrize("padded", [pytest.param(False, marks=REFERENCES), True])
@pytest.mark.parametrize("model_type", ["deepseek_v32", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_the_same_as_one_row_at_a_time(
    model_type: str, padded: bool, oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    model = oracle(model_type, num_hidden_layers=2)
    tokens = [random_ids(context + MAX_ROWS, seed=i) for i, context in enumerate(CONTEXTS)]
    llm = LLM(
        model.folder,
        kernels="triton",  # comparing them with their references takes long in the interpreter
        device="cuda" if CUDA else "cpu",
        dtype="float32",
        page_size=PAGE,
        max_model_len=128,
        cache_memory="2MiB",
        enforce_eager=True,
        progress=False,
    )
    alone, rows = (Rows(llm, tokens, padded=form) for form in (False, padded))
    alone.step(list(CONTEXTS), decodes=False)  # both runners use the same pages
    for request in rows.requests:
        request.num_computed_tokens = len(request.prompt) - MAX_ROWS
    expected = []
    for _ in range(MAX_ROWS):
        expected.append(alone.step([1] * len(CONTEXTS)))
    wanted = [[torch.cat([step[i][what] for step in expected]) for what in range(2)] for i in range(len(CONTEXTS))]
    for ids, (_, logits) in zip(tokens, wanted, strict=True):
        assert same(model.logits(ids)[-MAX_ROWS:].to(logits), logits)
    # Other tokens are written to the slots first, and rewound.
    for request, ids in zip(rows.requests, tokens, strict=True):
        request.prompt = ids[:-MAX_ROWS] + [5] * MAX_ROWS
    rows.step([MAX_ROWS] * 3)
    rows.rewind([MAX_ROWS] * 3)
    for request, ids in zip(rows.requests, tokens, strict=True):
        request.prompt = ids
    for counts in ([1] * 3, [2] * 3, [4] * 3, [3, 0, 2]):
        results = iter(rows.step(counts))
        for count, (hidden, logits) in zip(counts, wanted, strict=True):
            if count:
                its_hidden, its_logits = next(results)
                assert same(hidden[:count], its_hidden) and same(logits[:count], its_logits), counts
        rows.rewind(counts)
