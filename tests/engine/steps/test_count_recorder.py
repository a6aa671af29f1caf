"""Loads of experts, counted on the device and written to a file, against a plain recount of the router's `topk_ids`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, ParallelConfig, SamplingParams
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.graphs import DecodeGraphs
from dsa_engine.engine.steps.rebalancing import CountRecorder, moe_layers
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.model import moe
from dsa_engine.parallel.experts.counts import ExpertCounter, ExpertCounts, count_topk_ids
from dsa_engine.parallel.group import Group
from fake_cuda.device import FakeDevice

CPU = torch.device("cpu")
FEWER = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "max_model_len": 512,
    "cache_memory": "8MiB",
    "progress": False,
    "hf_overrides": FEWER,
}
PROMPTS = [[5 + i % 200 for i in range(n)] for n in (70, 9, 1)]


@pytest.fixture
def routed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[int]]]:
    """The router's `topk_ids` so far, by the address of the layer's bias."""
    chosen: dict[int, list[int]] = {}
    original = moe.route

    def route(scores: torch.Tensor, bias: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        topk_ids, topk_weights = original(scores, bias, **options)
        token_mask = options["token_mask"]
        rows = topk_ids if token_mask is None else topk_ids[token_mask]
        chosen.setdefault(bias.data_ptr(), []).extend(rows.flatten().tolist())
        return topk_ids, topk_weights

    monkeypatch.setattr(moe, "route", route)
    yield chosen


def recounted(llm: LLM, routed: dict[int, list[int]]) -> tuple[tuple[int, ...], ...]:
    layers, experts = moe_layers(llm.engine.model).values(), llm.engine.config.n_routed_experts
    return tuple(
        tuple(torch.tensor(routed.get(layer.router.bias.data_ptr(), [])).long().bincount(minlength=experts).tolist())
        for layer in layers
    )


@pytest.mark.parametrize("way", ["eager", "padded", "drafts"])
def test_the_file_has_every_choice_once(
    way: str, routed: dict[int, list[int]], demo_cache: object, tmp_path: Path
) -> None:
    path = tmp_path / "loads.json"
    drafts: dict[str, Any] = {"speculative_config": {"num_speculative_tokens": 1}} if way == "drafts" else {}
    llm = LLM("demo-random", parallel=ParallelConfig(record_expert_loads=path), **OPTIONS, **drafts)
    engine = llm.engine
    if way == "padded":
        contexts = ContextBuckets(fewest=32)
        engine.runner.graphs = DecodeGraphs(engine.model, engine.cache, capture=False, contexts=contexts)
    routed.clear()  # what was run at the start does not count
    llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    llm.prompt_logits(PROMPTS[1])
    expected = recounted(llm, routed)
    assert not path.exists(), "an interval has many steps"
    llm.close()
    loads = ExpertCounts.read(path)
    assert loads.layers == ((1, 2, 3) if drafts else (1, 2))
    assert loads.loads == expected
    if not drafts:
        rows = sum(len(prompt) + 3 for prompt in PROMPTS) + len(PROMPTS[1])
        assert [sum(layer) for layer in loads.loads] == [rows * engine.config.num_experts_per_tok] * 2, "no padding"
    with LLM(
        "demo-random", parallel=EmulatedConfig(emulate_world=4, expert_loads=path, redundant_experts=4), **OPTIONS
    ) as llm:
        llm.generate(PROMPTS[1:], SamplingParams(max_tokens=2, ignore_eos=True))
        placements = [moe_layers(llm.engine.model)[layer].expert_parallel.placement for layer in (1, 2)]
    assert [sum(map(len, placement.held)) for placement in placements] == [28, 28]


def test_both_micro_batches_of_a_step_are_counted(routed: dict[int, list[int]], demo_cache: object) -> None:
    dbo = {"enable_dbo": True}
    with LLM("demo-random", parallel=EmulatedConfig(emulate_world=2), **OPTIONS, **dbo) as llm:
        model = llm.engine.model
        layers = moe_layers(model)
        counter = ExpertCounter("", [*layers], 24, Group((0,), 0, None), CPU)
        for number, layer in layers.items():
            layer.router.counts = counter.counts(number)
        routed.clear()
        llm.generate(PROMPTS, SamplingParams(max_tokens=2, ignore_eos=True))
        assert len(next(iter(routed.values()))) > 0
        assert counter.total()().loads == recounted(llm, routed)


def counter_of_one() -> ExpertCounter:
    return ExpertCounter("m", (1, 4), 3, Group((0,), 0, None), CPU)


def choose(counter: ExpertCounter, *experts: int) -> None:
    count_topk_ids(torch.tensor([experts], dtype=torch.int32), counter.counts(4))


def test_two_readers_do_not_disturb_each_other() -> None:
    counter, none = counter_of_one(), (0, 0, 0)
    choose(counter, 2, 0, -1)
    assert counter.take().loads == (none, (1, 0, 1))
    choose(counter, 2)
    with counter.paused():
        choose(counter, 0)
    total = counter.total()
    assert counter.take().loads == (none, (0, 0, 1)) and total().loads == (none, (1, 0, 2))
    counter.forget()
    assert counter.take() == counter.total()() == ExpertCounts("m", (1, 4), (none, none))


def test_a_file_at_intervals_and_at_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counter, path = counter_of_one(), tmp_path / "loads.json"
    recorder, other = CountRecorder(counter, path, every=2), CountRecorder(counter, None, every=1)
    written = []
    for _ in range(5):
        choose(counter, 1)
        recorder.turn()
        other.turn()
        written.append(ExpertCounts.read(path).loads[1][1] if path.exists() else None)
    assert written[0] is None and None not in written[1:] and list(tmp_path.iterdir()) == [path]
    choose(counter, 1)
    recorder.write()
    assert json.loads(path.read_text()) == {"version": 1, "model": "m", "layers": [1, 4], "loads": [[0] * 3, [0, 6, 0]]}
    path.unlink()
    tmp_path.rmdir()
    recorder.write()
    assert "record_expert_loads: cannot write" in caplog.text and "No such file" in caplog.text
    tmp_path.mkdir()


def test_a_run_before_a_capture_is_not_counted(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose graph is new computes twice."""
    paused: list[ExpertCounter] = []
    original = ExpertCounter.paused
    monkeypatch.setattr(ExpertCounter, "paused", lambda self: paused.append(self) or original(self))
    with FakeDevice() as device:
        engine = fake_engine(
            device,
            "deepseek_v32",
            8,
            {"record_expert_loads": "loads.json"},
            cudagraph_capture_sizes=[2],
            max_model_len=4096,
        )
        assert len(device.captures) == len(paused) > 0 and set(paused) == {engine.model.loads}


def test_what_follows_a_launch(tiny_llm: Callable[..., LLM]) -> None:
    """Hooks get the chunks of a step; an error in one ends the step's requests."""
    lengths: list[int] = []
    with tiny_llm(600) as llm:
        engine, params = llm.engine, SamplingParams(max_tokens=3, ignore_eos=True)
        engine.after_launch = (*engine.after_launch, lambda chunks: lengths.extend(one.length for one in chunks))
        request = engine.add([5] * 10, params)
        while engine.has_work:
            engine.step()
        assert lengths[0] == 10 and len(request.output) == 3
        engine.after_launch = (lambda chunks: 1 / 0,)  # type: ignore[assignment,return-value]
        request = engine.add([6] * 10, params)
        with pytest.raises(ZeroDivisionError):
            engine.step()
        assert request.finish_reason == "error" and not engine.has_work
