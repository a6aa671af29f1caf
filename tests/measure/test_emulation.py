"""One rank of many in one process: what is refused, what its groups return, and how its figures are put together.

Against a true run: distributed/test_emulation.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.demo import demo_config
from dsa_engine.measure.emulation.arguments import FullDepth
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.links import Links
from dsa_engine.measure.emulation.overlap_model import Communication, replay, watched
from dsa_engine.measure.figures import Figure, depth_factors, percentiles
from dsa_engine.measure.prefill_benchmark import measure_latency, measure_prefill, random_prompt
from dsa_engine.measure.stage_timer import DeviceClock
from dsa_engine.model.config import ModelConfig
from dsa_engine.parallel import Mesh, ParallelConfig
from dsa_engine.parallel.group import Collective, CollectiveLog

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"emulate_world": 0}, "emulate_world must be a positive integer, not 0"),
        ({"emulate_world": "4"}, "emulate_world must be a positive integer, not '4'"),
        (
            {"emulate_world": 4, "emulate_rank": 4},
            "emulate_rank must be one of the ranks 0 … 3 of emulate_world 4, not 4",
        ),
        ({"emulate_world": 4, "emulate_rank": -1}, "emulate_rank must be one of the ranks 0 … 3"),
        ({"emulate_world": 4, "emulate_rank": 1.0}, "emulate_rank must be one of the ranks 0 … 3"),
        ({"emulate_rank": 1}, "emulate_rank must be one of the ranks 0 … 0 of emulate_world None, not 1"),
        ({"expert_loads": (1.0,)}, "expert_loads need an emulate_world of at least 2"),
        (
            {"emulate_world": 2, "expert_loads": ()},
            "expert_loads must be numbers of at least 0, and one above it, not ()",
        ),
        ({"emulate_world": 2, "expert_loads": (0, 0)}, "expert_loads must be numbers of at least 0, and one above it"),
        ({"emulate_world": 2, "expert_loads": (1, -1)}, "expert_loads must be numbers of at least 0"),
        ({"emulate_world": 2, "expert_loads": ("1",)}, "expert_loads must be numbers of at least 0"),
        ({"emulate_world": 2, "expert_loads": (float("nan"),)}, "expert_loads must be numbers of at least 0"),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ParallelConfig(**keys)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"emulate_world": 6, "cp_size": 4}, "cp_size 4 does not divide the world size 6"),
        ({"emulate_world": 6, "tp_size": 5}, "tp_size 5 does not divide the world size 6"),
        ({"emulate_world": 5}, "n_routed_experts 24 cannot be divided over 5 ranks"),
        ({"emulate_world": 24, "tp_size": 24}, "vocab_size 320 cannot be divided over 24 ranks"),
    ],
)
def test_worlds_that_do_not_divide(keys: dict[str, Any], message: str, demo_cache: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo-random", device="cpu", parallel=ParallelConfig(**keys))


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "WORLD_SIZE"])
def test_torchrun_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr("dsa_engine.parallel.mesh.report_failures", lambda: None)  # it would hook this process
    with pytest.raises(ValueError, match="emulate_world 64 runs one rank in one process; start it without torchrun"):
        Mesh.create(ParallelConfig(emulate_world=64), "cpu")


def test_groups_have_their_size_and_place() -> None:
    mesh = Mesh.create(ParallelConfig(emulate_world=64, emulate_rank=21, cp_size=16, tp_size=8), "cpu")
    assert (mesh.rank, mesh.world_size, mesh.emulated, mesh.reports) == (21, 64, True, True)
    assert mesh.ep.ranks == tuple(range(64)) and mesh.ep.index == 21
    assert mesh.cp.ranks == tuple(range(16, 32)) and mesh.cp.index == 5
    assert mesh.tp.ranks == tuple(range(16, 24)) and mesh.tp.index == 5
    alone = Mesh.create(ParallelConfig(emulate_world=1), "cpu")
    rows = torch.randn(3, 2)
    assert alone.ep.all_gather(rows) is rows and alone.ep.all_to_all(rows) is rows and alone.ep.bytes_sent == 0


def test_collectives_have_shapes_bytes_and_own_rows() -> None:
    log = CollectiveLog(stage=lambda: "here")
    group = EmulatedGroup((4, 5, 6), 1, None, log=log)
    rows = torch.randn(2, 5)
    gathered = group.all_gather_async(rows)()
    assert gathered.shape == (6, 5) and torch.equal(gathered[2:4], rows)
    assert not torch.equal(gathered[:2], rows), "others differ, or every score would tie"
    codes = torch.tensor([[7], [-3]])
    assert group.all_gather(codes).tolist() == [[7], [0]] * 3, "others have no errors, and all token ids exist"
    assert group.all_gather(rows.to(torch.float64)).tolist() == rows.double().repeat(3, 1).tolist()
    assert torch.equal(group.reduce_scatter(gathered), rows)
    assert group.all_to_all(gathered).shape == (6, 5)
    assert group.all_to_all(rows, [1, 0, 1], [4, 0, 3]).shape == (7, 5)
    assert group.all_to_all(rows[:0], [0, 0, 0], [2, 0, 3]).shape == (5, 5)
    sent = [80, 32, 160, 80, 80, 40, 0]
    assert [c.bytes_sent for c in log.collectives] == sent and group.bytes_sent == sum(sent)
    assert [c.kind for c in log.collectives] == ["all_gather"] * 3 + ["reduce_scatter"] + ["all_to_all"] * 3
    assert [c.asynchronous for c in log.collectives] == [True] + [False] * 6
    assert log.collectives[5] == Collective("all_to_all", (4, 5, 6), 1, (20, 0, 20), (80, 0, 60), False, "here")
    assert [(e.what, e.number) for e in log.events][:3] == [("begin", 0), ("wait", 0), ("begin", 1)]


class Figures(Links):
    """Links on which a collective takes as many seconds as it sends bytes."""

    def seconds(self, collective: Collective) -> float:
        return float(collective.bytes_sent)


def played(*program: tuple[str, float, float]) -> Communication:
    """A program on a clock moved by hand: ("work", seconds, 0), ("sync"|"async", bytes, seconds of filling), "wait"."""
    now, log = [100.0], CollectiveLog()
    log.mark = lambda: now[0]
    issued: list[int] = []
    for what, amount, filling in program:
        if what == "work":
            now[0] += amount
            continue
        if what == "wait":
            event = log.wait(issued.pop(0))
        else:
            made = Collective("all_gather", (0, 1), 0, (0, int(amount)), (0, int(amount)), what == "async", what)
            event = log.begin(made)
            if what == "async":
                issued.append(event.number)
        now[0] += filling
        event.after = now[0]
    return replay(log, 100.0, DeviceClock(CPU), Figures())


@pytest.mark.parametrize(
    ("program", "total", "stalled"),
    [
        ([("work", 5, 0), ("sync", 3, 0), ("work", 5, 0)], 3, 3),
        ([("async", 3, 0), ("work", 5, 0), ("wait", 0, 0)], 3, 0),
        ([("async", 7, 0), ("work", 5, 0), ("wait", 0, 0), ("work", 9, 0)], 7, 2),  # work behind the wait hides nothing
        ([("async", 7, 50), ("work", 5, 0), ("wait", 0, 50)], 7, 2),  # nor does what only stands in for the others
        ([("async", 4, 0), ("sync", 2, 0), ("work", 5, 0), ("wait", 0, 0)], 6, 6),  # links are shared: in turn
        ([("async", 4, 0), ("async", 4, 0), ("work", 5, 0), ("wait", 0, 0), ("wait", 0, 0)], 8, 3),  # work hides once
        ([("async", 4, 0), ("work", 1, 0), ("sync", 2, 0), ("work", 1, 0), ("wait", 0, 0)], 6, 5),
        ([], 0, 0),
    ],
)
def test_what_hides_behind_what(program: list[tuple[str, float, float]], total: float, stalled: float) -> None:
    result = played(*program)
    assert (result.seconds, result.stalled_seconds) == (total, stalled)


def test_communication_adds_up_by_stage() -> None:
    one = played(("sync", 3, 0), ("async", 4, 0), ("work", 1, 0), ("wait", 0, 0))
    assert one.total == {"sync": 3, "async": 4} and one.stalls == {"sync": 3, "async": 3}
    both = Communication.sum([one, one]).scaled(0.5)
    assert both == one


def test_figures_keep_measured_and_modelled_apart() -> None:
    measured = Figure("ttft", [0.2, 0.1, 0.3], tokens=100, ranks=4)
    result = measured.to_json("input_throughput")
    assert result["median_ttft_ms"] == pytest.approx(200) and result["p99_ttft_ms"] == pytest.approx(298)
    assert result["input_throughput"] == pytest.approx(500)
    assert result["input_throughput_per_device"] == pytest.approx(125)
    modelled = Communication({"MoE dispatch": 0.2, "communication": 0.1}, {"MoE dispatch": 0.2, "communication": 0.0})
    result = Figure("ttft", [0.2, 0.1, 0.3], 100, 4, modelled).to_json("input_throughput")
    assert "median_ttft_ms" not in result, "the name stands for what was measured"
    assert result["median_computed_ttft_ms"] == pytest.approx(200)
    assert {k: v for k, v in result["ttft_ms"].items() if k != "communication_by_stage"} == pytest.approx(
        {"computed": 200, "communication": 300, "not_overlapped": 500, "overlapped": 400}
    )
    assert result["input_throughput_per_device_overlapped"] == pytest.approx(100 / 0.4 / 4)


def test_other_depths() -> None:
    raw = demo_config()
    whole = ModelConfig.from_dict(raw | {"num_hidden_layers": 61, "first_k_dense_replace": 3})
    few = ModelConfig.from_dict(raw | {"num_hidden_layers": 5, "first_k_dense_replace": 3})
    factors = depth_factors(few, whole)
    assert factors["MLA prolog"] == factors["lightning indexer"] == 61 / 5
    assert factors["dense MLP"] == 1 and factors["MoE experts"] == 29 and "LM head" not in factors
    stages = {"MLA prolog": 1.0, "dense MLP": 1.0, "MoE experts": 1.0, "LM head": 0.5, "other": 0.5}
    figure = Figure("ttft", [8.0], 1, 1)  # twice what the stages of the watched run add up to: only shares count
    grown = 2 * (61 / 5 + 1 + 29 + 1)
    assert figure.scaled(stages, factors) == {"ttft_ms": pytest.approx(grown * 1e3)}
    modelled = Communication({"MoE dispatch": 1.0, "other": 1.0}, {"MoE dispatch": 0.5, "other": 1.0})
    scaled = Figure("ttft", [8.0], 1, 1, modelled).scaled(stages, factors)
    assert scaled == pytest.approx(
        {
            "ttft_ms_computed": grown * 1e3,
            "ttft_ms_not_overlapped": (grown + 29 + 1) * 1e3,
            "ttft_ms_overlapped": (grown + 29 / 2 + 1) * 1e3,
        }
    )
    with pytest.raises(ValueError, match="no MoE layer was measured and the whole model has 58; measure more layers"):
        depth_factors(ModelConfig.from_dict(raw | {"num_hidden_layers": 2, "first_k_dense_replace": 3}), whole)


def test_full_depth_is_that_of_the_file(demo_cache: Path) -> None:
    llm = LLM(
        "demo-random", device="cpu", load_format="dummy", hf_overrides={"num_hidden_layers": 2, "vocab_size": 640}
    )
    depth = FullDepth.of(llm)
    assert depth is not None and (depth.measured, depth.layers) == (2, 4)
    assert depth.factors["MoE experts"] == 3 and depth.factors["dense MLP"] == 1
    assert "SCALED, not measured" in depth.line("x", "ttft", {"ttft_ms": 5.0})
    assert FullDepth.of(LLM("demo-random", device="cpu")) is None


@pytest.fixture(scope="module")
def emulated(demo_cache: Path) -> LLM:
    parallel = ParallelConfig(emulate_world=8, emulate_rank=2, tp_size=2)
    return LLM("demo-random", device="cpu", max_model_len=1024, parallel=parallel, progress=False)


def test_the_rank_holds_its_part(emulated: LLM) -> None:
    (moe,) = {layer.moe.gate_up.shape[0] for layer in emulated.engine.model.layers if layer.moe is not None}
    assert moe == 24 // 8
    assert emulated.engine.model.embed.shape[0] == 320 // 2
    assert emulated.engine.cache.pages > 0


def test_generate_runs_and_leaves_nothing(emulated: LLM) -> None:
    """Ten sequences on eight ranks: some ranks decode two, and tokens of others come from nowhere."""
    free = emulated.engine.scheduler.free_pages
    prompts = [[5 + i] * (30 * i + 1) for i in range(10)]
    outs = emulated.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert [len(out.token_ids) for out in outs] == [5] * 10
    assert all(0 <= token < 320 for out in outs for token in out.token_ids)
    assert emulated.engine.scheduler.free_pages == free
    assert bool(torch.isfinite(emulated.engine.prefill(list(range(4, 250)) * 3)).all())


def test_a_watched_step_knows_its_collectives(emulated: LLM) -> None:
    with watched(emulated.engine) as one:
        emulated.engine.prefill(list(range(4, 304)))
    assert one.log is not None
    by_stage = {c.stage for c in one.log.collectives}
    assert by_stage >= {"embedding", "communication", "MoE dispatch", "MoE combine", "MLA epilog"}
    gathers = [c for c in one.log.collectives if c.asynchronous]
    assert len(gathers) == 4 and {c.ranks for c in gathers} == {tuple(range(8))}
    assert one.emulation_seconds() > 0 and "emulation" not in one.stage_seconds()
    communication = one.communication(Links())
    assert 0 < communication.stalled_seconds <= communication.seconds
    assert all(group.log is None for group in emulated.engine.mesh.groups)


def test_prefill_of_an_emulated_rank(emulated: LLM) -> None:
    result = measure_prefill(emulated.engine, random_prompt(emulated.engine, 801), warmup=0, repeat=2)
    assert len(result.peak_memory_bytes) == len(result.attention_pairs) == len(result.stage_seconds) == 1
    assert result.attention_pairs[0] == pytest.approx(801 * 802 / 2 / 8, rel=0.03) and result.imbalance < 1.03
    ttft = result.ttft
    assert 0 < ttft.median <= ttft.overlapped <= ttft.not_overlapped
    assert json.dumps(result.to_json())


def test_decode_of_an_emulated_rank(emulated: LLM) -> None:
    result = measure_latency(emulated, 300, 4, batch_size=8, warmup=0, repeat=2)
    assert result.tpot is not None and result.itl is not None and len(result.itl.seconds) == 6
    assert result.tpot.communication is not None and result.tpot.communication.seconds > 0
    assert result.tpot.communication.total.get("communication", 0) == 0, "decode gathers no cache rows"
    assert result.prefill.communication is not None and result.prefill.communication.total["communication"] > 0
    for figure in (result.ttft, result.prefill, result.tpot):
        assert min(figure.seconds) > 0 and figure.ranks == 8
    slow = measure_latency(emulated, 300, 4, batch_size=8, warmup=0, repeat=1, links=Links(start_us=1e6))
    assert slow.tpot is not None and slow.tpot.communication is not None
    # Embedding, o_proj (2 for each of 4 layers), experts (two gathers and a sum for each of 3), LM head and its rows,
    # sampled tokens.
    assert round(slow.tpot.communication.seconds) == 1 + 2 * 4 + 3 * 3 + 2 + 1


def test_wrong_number_of_loads_is_said_at_the_first_layer(demo_cache: Path) -> None:
    parallel = ParallelConfig(emulate_world=2, expert_loads=(1.0, 2.0))
    llm = LLM("demo-random", device="cpu", parallel=parallel)
    with pytest.raises(ValueError, match="there are 2 expert loads, the model has 24 routed experts"):
        llm.engine.prefill([5, 6, 7])


@pytest.mark.parametrize("count", [1, 2, 3, 6, 100])
def test_percentiles(count: int) -> None:
    seconds = [((37 * i) % 101) / 1e3 for i in range(count)]
    found, ms = percentiles("x", seconds), np.array(seconds) * 1e3
    assert (found["p90_x_ms"], found["p99_x_ms"]) == pytest.approx(np.percentile(ms, [90, 99]))
    expected = (ms.mean(), np.median(ms), ms.min(), ms.max())
    assert tuple(found[f"{name}_x_ms"] for name in ("mean", "median", "min", "max")) == pytest.approx(expected)
