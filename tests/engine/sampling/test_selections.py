"""``SamplingParams.selection``: positions and weights equal those of ``transformers``, by every way through the engine,
and tokens are what they are without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.limits import new_requests
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.outputs import RequestOutput, Selection

OPTIONS: dict[str, Any] = {"device": "cpu", "cache_memory": "64MiB", "progress": False}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 7, "ignore_eos": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("deepseek_v32", {}),
    "glm": ("glm_moe_dsa", {"num_hidden_layers": 4, "indexer_types": ["full", "shared", "full", "shared"]}),
}


def of_transformers(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """bool and float32 ``[layers, len, len]``: what each token selects, and its weights on average over the heads."""
    selected, weights, hooks = [], [], []
    earlier = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()

    def take_selection(_: Any, __: Any, indices: torch.Tensor) -> None:
        selected.append(torch.zeros_like(earlier).scatter(1, indices[0].long(), True) & earlier)

    def take_weights(_: Any, __: Any, output: Any) -> None:
        weights.append(output[1][0].mean(dim=0))
        selected[len(weights) :] = []
        selected.extend(selected[-1:] * (len(weights) - len(selected)))  # a layer without an indexer

    for layer in model.model.layers:
        hooks.append(layer.self_attn.register_forward_hook(take_weights))
        if getattr(layer.self_attn, "indexer", None) is not None:
            hooks.append(layer.self_attn.indexer.register_forward_hook(take_selection))
    with torch.no_grad():
        model(torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(selected), torch.stack(weights)


def check(output: RequestOutput, model: Any, tokens: int) -> None:
    """Compares the selection of an output with that of ``transformers`` for the same tokens."""
    ids, first, recorded = [*output.prompt_token_ids, *output.token_ids], len(output.prompt_token_ids), output.selection
    assert recorded is not None and recorded.positions.dtype == np.int32 and recorded.weights.dtype == np.float32
    selected, weights = of_transformers(model, ids[:-1])
    layers, topk = len(selected), model.config.index_topk
    assert recorded.positions.shape == recorded.weights.shape == (layers, tokens, topk)
    for layer in range(layers):
        for number in range(tokens):
            row = first - 1 + number
            expected = selected[layer, row].nonzero()[:, 0].tolist()
            given = recorded.positions[layer, number].tolist()
            assert given == expected + [-1] * (topk - len(expected)), (layer, number)
            ours = recorded.weights[layer, number]
            np.testing.assert_allclose(ours[: len(expected)], weights[layer, row][expected], rtol=2e-4, atol=1e-6)
            assert not ours[len(expected) :].any() and abs(float(ours.sum()) - 1) < 1e-5


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["whole", "chunked", "padded"])
def test_selections_of_transformers(
    name: str, how: str, oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    """Prompts below index_topk (64), across it while tokens are generated, and above; other requests beside them."""
    model_type, keys = MODELS[name]
    made = oracle(model_type, **keys)
    llm = LLM(made.folder, **OPTIONS | ({"max_num_batched_tokens": 48} if how == "chunked" else {}))
    engine = llm.engine
    if how == "padded":
        contexts = ContextBuckets(fewest=32)
        engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=contexts)
    prompts = [random_ids(length) for length in (9, 61, 300, 33)]
    plain = llm.generate(prompts, SamplingParams(**GREEDY))
    wanted = [4, 7, 5, 0]
    outputs = llm.generate(prompts, [SamplingParams(selection=count, **GREEDY) for count in wanted])
    for output, alone, count in zip(outputs, plain, wanted, strict=True):
        assert output.token_ids == alone.token_ids and alone.selection is None
        if count:
            check(output, made.model, count)
        else:
            assert output.selection is None


def test_steps_are_padded_again_after_the_last_recorded_token(
    oracle: Callable[..., Any], random_ids: Callable[..., list[int]]
) -> None:
    llm = LLM(oracle("deepseek_v32").folder, **OPTIONS)
    engine, padded = llm.engine, list[bool]()
    engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=ContextBuckets(fewest=32))
    engine.runner.hooks.append(lambda plan: padded.append(plan.bucket is not None))
    llm.generate([random_ids(100)], SamplingParams(selection=3, **GREEDY))
    assert padded == [False] * 3 + [True] * 4  # the first token is the prefill's


def test_with_drafts_preemptions_hits_and_a_stop(
    drafting_oracle: Callable[..., Any], random_ids: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is computed again if a draft is refused, or after a preemption: the last one counts."""
    folder, ids = drafting_oracle("deepseek_v32").folder, random_ids(150)
    (alone,) = LLM(folder, **OPTIONS).generate([ids], SamplingParams(selection=12, **GREEDY))
    llm = LLM(folder, page_size=16, speculative_config={"num_speculative_tokens": 2}, **OPTIONS)
    engine, step, lengths = llm.engine, llm.engine.step, list[int]()

    def disturbing() -> Any:
        read = step()
        for request in engine.scheduler.decoding.requests[:1]:
            lengths.append(len(request))
            if len(lengths) in (1, 3):
                engine.scheduler.preempt(request)
            else:  # the first draft is right, and the second one is not
                done = len(request) - len(ids)
                right = [alone.token_ids[done], *(3 + token % 7 for token in alone.token_ids[done + 1 :])]
                request.drafts = right[: len(request.drafts)]
        return read

    monkeypatch.setattr(engine, "step", disturbing)
    for _ in range(2):  # the second time there are hits
        lengths.clear()
        (output,) = llm.generate([ids], SamplingParams(selection=12, **GREEDY))
        assert output.token_ids == alone.token_ids and output.metrics.preemptions == 2
        assert any(after == before + 2 for before, after in zip(lengths, lengths[1:], strict=False)), lengths
        same(output.selection, alone.selection, 7)
    assert output.num_cached_tokens > 0
    monkeypatch.undo()
    stop = alone.token_ids[3]
    stopped = llm.generate([ids], SamplingParams(selection=12, **GREEDY | {"stop_token_ids": [stop]}))[0]
    same(stopped.selection, alone.selection, alone.token_ids.index(stop) + 1)
    *_, last = llm.stream(ids, SamplingParams(selection=2, **GREEDY))
    same(last.selection, alone.selection, 2)


def same(one: Selection | None, other: Selection | None, tokens: int) -> None:
    assert one is not None and other is not None and one.positions.shape[1] == tokens
    assert (one.positions == other.positions[:, :tokens]).all()
    np.testing.assert_allclose(one.weights, other.weights[:, :tokens], rtol=2e-4, atol=1e-6)


def test_what_is_not_possible(oracle: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"selection must .*256.*300"):
        SamplingParams(selection=300)
    llm = LLM(oracle("deepseek_v3").folder, **OPTIONS)
    with pytest.raises(ValueError, match=r"selection=2 is not possible: deepseek_v3 has no indexer.*leave it out"):
        llm.generate([[2, 3, 4]], SamplingParams(selection=2))
    engine = LLM(oracle("deepseek_v32").folder, **OPTIONS).engine
    assert engine.limits.no_selection is None
    monkeypatch.setattr(type(engine.mesh), "has_counterpart", True)
    with pytest.raises(ValueError, match=r"selection=2 is not possible: with prefill_ranks .*; leave one of them out"):
        new_requests([2, 3, 4], SamplingParams(selection=2), None, engine.limits)
