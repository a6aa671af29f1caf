"""Decode in padded steps of static shape, as CUDA graphs replay them, and with several rows a request: same tokens.

On a GPU the graphs are captured, with the CPU's kernels the steps are recorded. Under ``TRITON_INTERPRET=1`` the same
padded steps run kernel by kernel.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.config.model import ModelConfig
from dsa_engine.demo import demo_folder
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import key_of
from dsa_engine.engine.runner import ModelRunner
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.plan import Bucket, StepPlan
from dsa_engine.kernels.runtime.integers import next_power_of_2
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.forward_batch import BlockTables, ForwardBatch
from fake_cuda import FakeDevice

CUDA = torch.cuda.is_available() and not INTERPRETED
CAPTURES = not INTERPRETED
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


def test_buckets() -> None:
    assert [next_power_of_2(n) for n in (1, 2, 3, 4, 5, 8, 9, 4097)] == [1, 2, 4, 4, 8, 8, 16, 8192]


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
    assert before == [ahead and INTERPRETED, ahead, ahead, ahead]
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


@pytest.fixture
def config(demo_cache: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(demo_folder())


@pytest.fixture
def requests() -> list[Request]:
    return [Request(i, list(range(9)), SamplingParams(), pages=[2 * i, 2 * i + 1]) for i in range(3)]


def test_rows_of_a_bucket(config: ModelConfig, requests: list[Request]) -> None:
    """Missing rows of a request with fewer than others, and rows of missing requests, are padding."""
    # Start, length, ranks, number of logits (-1: the default).
    parts = [(5, 3, range(1), 2), (4, 1, range(1), 0), (7, 2, range(1, 2), -1)]
    chunks = [Chunk(request, *part) for request, part in zip(requests, parts, strict=True)]
    steps = [StepPlan.of(chunks, rank, 3, config, max_decode_rows=3) for rank in range(3)]
    assert steps[0].decodes and not StepPlan.of(chunks, 0, 3, config, max_decode_rows=2).decodes
    padded = [step.padded(config, ContextBuckets(fewest=2)) for step in steps]
    for one in padded:
        assert one.bucket == Bucket(requests=2, rows_per_request=3, context=16) and one.decodes
        assert one.rows.tolist() == [6] * 3 and [one.samples.rows_of([r]) for r in range(3)] == [2, 1, 0]
        samples = [one.samples.keys.tolist(), one.samples.ranks.tolist(), one.samples.counts.tolist()]
        assert samples == [[key_of(requests[0]), key_of(requests[2])], [0, 1], [2, 1]]
    plans = [step.own for step in padded]
    assert [plan.rows for plan in plans] == [6] * 3
    positions = [[5, 6, 7, 4, -1, -1], [7, 8, -1, -1, -1, -1], [-1] * 6]
    assert [plan.positions.tolist() for plan in plans] == positions
    assert plans[0].wanted == [(requests[0], 7, 1), (requests[0], 8, 2)]
    assert plans[1].wanted == [(requests[2], 9, 1)] and not plans[2].wanted


def test_inputs_of_a_padded_step_are_written_over(config: ModelConfig, requests: list[Request]) -> None:
    """The tensors that a graph reads are the same, and have the values of new ones."""
    llm = LLM("demo-random", device="cpu", kernels="triton", cache_memory="1MiB", max_model_len=64, progress=False)
    runtime, batches = llm.engine.model.runtime, list[ForwardBatch]()

    class Kept:
        runtime, config = llm.engine.model.runtime, llm.engine.model.config

        def __call__(self, batch: ForwardBatch, cache: Any) -> torch.Tensor:
            batches.append(batch)
            return batch.cos

    model: Any = Kept()
    cache: Any = SimpleNamespace(page_size=8, block_tables=BlockTables(8, runtime.mesh.device))

    def padded(*parts: tuple[int, int, int]) -> StepPlan:
        chunks = [Chunk(requests[i], start, length, range(1)) for i, start, length in parts]
        return StepPlan.of(chunks, 0, 1, config, max_decode_rows=2).padded(config, ContextBuckets(fewest=16))

    step, later = padded((0, 5, 2), (1, 4, 1), (2, 0, 2)), padded((2, 2, 1), (0, 7, 2), (1, 6, 1))
    graphs, fresh = (DecodeGraphs(model, cache, capture=False) for _ in range(2))
    graphs.forward(step, None)
    (batch,) = batches
    assert batch.rows == batch.ep_rows == 8 and batch.token_mask is not None and batch.mha is None
    assert batch.input_ids.tolist() == [[5, 6, 4, 0, 0, 1, 0, 0]]
    assert batch.slot_mapping.tolist() == [5, 6, 20, -1, 32, 33, -1, -1]
    assert batch.token_mask.tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert batch.sparse_mqa.visible.tolist() == [6, 7, 5, 0, 1, 2, 0, 0]
    assert batch.sparse_mqa.sequences.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [s.end for s in batch.sparse_mqa] == [16] * 4, "on the host they see the whole context"
    assert later.bucket == step.bucket
    for one in (graphs, fresh):
        one.forward(later, None)
    _, again, new = batches
    for name in ("input_ids", "cos", "sin", "block_tables", "slot_mapping", "token_mask"):
        assert torch.equal(getattr(again, name), getattr(new, name))
    assert again.block_tables is batch.block_tables and again.sparse_mqa is batch.sparse_mqa
    assert torch.equal(again.sparse_mqa.visible, new.sparse_mqa.visible)
