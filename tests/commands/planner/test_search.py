"""The search for a plan: it keeps to the load, says what does not fit, and takes what is faster."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.cli import main
from dsa_engine.commands.planner.choices import DISPATCHES
from dsa_engine.commands.planner.plan import NEAR, CannotCut, Demand, NothingFits
from dsa_engine.commands.planner.prediction.deployment import UTILIZATION, Deployment, Placed
from dsa_engine.commands.planner.prediction.devices import DEVICES, device_named
from dsa_engine.commands.planner.prediction.efficiency import Efficiencies
from dsa_engine.commands.planner.prediction.predict import predict_prefill
from dsa_engine.commands.planner.search import Planner
from dsa_engine.commands.planner.tables import print_plan
from dsa_engine.config.model import ModelConfig
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.work import Work
from dsa_engine.options import EngineOptions

H200 = DEVICES["H200"]
# Options that a test need not search.
FIXED: dict[str, Any] = {"weights": "fp8", "cache": "fp8", "tp_size": 1, "chunk": 8192, "drafts": 0}


def test_prefill_takes_the_dispatch_that_is_faster(config: ModelConfig) -> None:
    """Between two machines all adapters carry a gather, and one of them what goes to a peer directly."""
    plans = {}
    for dispatch in (None, *DISPATCHES):
        fixed = FIXED | ({"moe_dispatch": dispatch} if dispatch else {})
        plan = Planner(config, H200, Efficiencies.assumed(), fixed).best(Demand(16, 32_768, ttft=0.3))
        plans[dispatch] = (plan.ttft, plan.prefill.how.dispatch)
    assert plans["all_gather"][1] == "all_gather" and plans["all_to_all"][1] == "all_to_all"
    assert plans[None] == min(plans[dispatch] for dispatch in DISPATCHES)
    combines = [
        predict_prefill(Placed(config, H200, Deployment(16, 16, dispatch=dispatch)), Efficiencies.assumed(), 32_768)
        for dispatch in ("all_gather", "all_to_all")
    ]
    gathered, direct = (one.stages["MoE combine"].computed for one in combines)
    assert gathered > 4 * direct, "a sum is written for every token of all ranks"
    stages = {"MoE experts": Work(), "MoE combine": Work()}
    for weights, quantised in (("fp8", 3 * 7168 * 58), ("bfloat16", 0)):
        placed = Placed(config, H200, Deployment(16, dispatch="all_gather", weights=weights))
        assert placed.dispatched(stages, 1, 16, "all_gather")["MoE experts"].activations == 16 * quantised


def test_the_best_plan_keeps_to_the_load(config: ModelConfig) -> None:
    planner = Planner(config, H200, Efficiencies.assumed(), FIXED)
    demand = Demand(32, 32_768, ttft=2.0, tpot=0.04)
    for split in (False, True):
        plan = planner.best(demand, split)
        assert plan.misses(demand) <= 0 and plan.ttft <= 2 and plan.tpot <= 0.04
        assert plan.devices <= 32 and plan.prefill.room >= 0 and plan.decode.room >= 0
        assert plan.split == split
        if split:
            fed = plan.prefill_instances * plan.prefill.prompts_per_s * demand.output_len
            made = plan.decode_instances * plan.decode.tokens_per_s
            assert plan.handover is not None
            landed = plan.decode_instances * plan.decode.how.ranks * demand.output_len / plan.handover.seconds
            assert plan.tokens_per_s == pytest.approx(min(fed, made, landed))
            one, other = plan.prefill.how, plan.decode.how
            assert (one.weights, one.cache) == (other.weights, other.cache), "rows travel as they are stored"
            assert plan.latency == pytest.approx(plan.ttft + plan.handover.exposed + demand.output_len * plan.tpot)
        else:
            assert plan.tokens_per_s == pytest.approx(plan.requests / plan.tpot)
    asked = planner.best(Demand(32, 32_768, requests=40))
    assert asked.requests >= 40
    impossible = Demand(32, 131_072, ttft=0.01)
    assert planner.best(impossible).misses(impossible) > 10, "the one that misses least"


def test_near_ties_go_to_the_lower_latency(config: ModelConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Eight prompts side by side on a rank each have a slightly higher rate than one on eight ranks."""
    planner = Planner(config, H200, Efficiencies.assumed(), FIXED | {"drafts": 3})
    plans = [planner.best(Demand(8, length)) for length in (16_384, 32_768, 65_536, 131_072)]
    for shorter, longer in pairwise(plans):
        assert 1 < longer.ttft / shorter.ttft < 5, "no jump from one length to the next"
    plan = plans[-1]
    highest = plan.highest_rate
    assert plan.prefill.how.cp_size == 8 and highest is not None and highest.prefill.how.cp_size == 1
    assert 1 - NEAR <= plan.tokens_per_s / highest.tokens_per_s < 1 and plan.latency < highest.latency
    print_plan("Together", plan, Demand(8, 131_072))
    shown = capsys.readouterr().out
    assert f"latency, within 10% of the highest rate: {highest.tokens_per_s:,.0f} tokens/s, TTFT" in shown
    assert "accepted drafts        85%, 72%, 61%, assumed (--acceptance); 3.19 tokens a step" in shown
    print_plan("Together", plan, Demand(8, 131_072, acceptance=(0.5,)))
    assert "50%, 50%, 50%, as given" in capsys.readouterr().out


def test_one_request_needs_no_room_for_a_second_prompt(config: ModelConfig) -> None:
    """The engine's own share of the memory, and what docs/RUNNING.md says of 8 × 80 GB."""
    assert EngineOptions.gpu_memory_utilization == UTILIZATION
    h100, how = DEVICES["H100"], {"weights": "int4-experts", "drafts": 0, "cache": "fp8", "tp_size": 8}
    plan = Planner(config, h100, Efficiencies.assumed(), how).best(Demand(8, 131_072))
    placed = Placed(config, h100, plan.prefill.how)
    assert plan.requests == 1 and 0 <= plan.prefill.room < 131_072 * placed.token_bytes
    text = (Path(__file__).resolve().parents[3] / "docs" / "RUNNING.md").read_text(encoding="utf-8")
    table = text.partition("| `tp_size` 8 |")[2].partition("\n\n")[0].splitlines()[2:]
    stored_as = {"FP8": "fp8", "INT4 experts": "int4-experts", "bfloat16": "bfloat16"}
    for line in table:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for cell, device, ranks in zip(cells, ("H100", "H200", "H100"), (8, 8, 64), strict=True):
            how = Deployment(ranks, ranks, 8, "all_gather", 2048, stored_as[name], "fp8")
            room = Placed(config, DEVICES[device], how).cache_room(2048)
            assert cell == ("does not fit" if room < 0 else f"{room / 2**30:.0f} GiB"), (name, device, ranks)


@pytest.mark.parametrize(
    ("name", "advice"),
    [("AMD EPYC", "files that were measured on a device of A100"), ("NVIDIA H20", "give --device H20")],
)
def test_files_of_another_device_are_refused(
    name: str, advice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prefill.json"
    ceilings = Ceilings(1e12, 1e11).to_json()
    file.write_text(json.dumps({"ceilings": ceilings, "device": name, "results": []}))
    with pytest.raises(SystemExit):
        main(["plan", "--measured", str(file)])
    shown = capsys.readouterr().err
    assert f"measured on {name}, not on --device H200" in shown and advice in shown
    assert DEVICES["H100"].is_called("NVIDIA H100 80GB HBM3") and DEVICES["A100"].is_called("NVIDIA A100-SXM4-80GB")


def test_what_does_not_fit_says_by_how_much(config: ModelConfig) -> None:
    """671 billion parameters in bfloat16 on 8 × 80 GB."""
    planner = Planner(config, DEVICES["H100"], Efficiencies.assumed(), {**FIXED, "weights": "bfloat16"})
    with pytest.raises(NothingFits) as missing:
        planner.best(Demand(8, 8192))
    weights = Placed(config, DEVICES["H100"], missing.value.nearest).weight_bytes
    assert missing.value.nearest.ranks == 8 and weights < missing.value.lacking + UTILIZATION * 80e9
    remedy = planner.remedy(Demand(8, 8192))
    assert remedy is not None and planner.best(Demand(remedy, 8192)).requests > 0
    with pytest.raises(ValueError, match="tp_size 7"):
        Planner(config, H200, Efficiencies.assumed(), {**FIXED, "tp_size": 7}).best(Demand(8, 8192))
    with pytest.raises(CannotCut, match="257 devices .* nothing fixed: .* at most 256"):
        Planner(config, H200, Efficiencies.assumed()).best(Demand(257, 8192))


def test_the_requests_asked_for_are_divided_over_the_instances(config: ModelConfig) -> None:
    planner, demand = Planner(config, H200, Efficiencies.assumed(), FIXED), Demand(64, 2048, requests=96)
    for split in (False, True):
        plan = planner.best(demand, split)
        assert plan.requests == 96 and plan.misses(demand) == 0


def test_no_room_to_split_leaves_the_other_plan(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--weights", "fp8", "--cache", "fp8", "--drafts", "0", "--chunk", "8192", "--tp-size", "8"]
    main(["plan", "--devices", "8", "--input-len", "8192", *fixed])
    shown = capsys.readouterr().out
    assert "8 of 8 devices" in shown and "NOT POSSIBLE: 8 devices cannot be cut into two instances or more" in shown
    main(["plan", "--devices", "8", "--input-len", "8192", *fixed, "--what-if", "devices"])
    assert capsys.readouterr().out.count("does not fit") == 5, "2 and 4 devices do not make 8 neighbours, nor 8 twice 8"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--weights", "fp8", "--cache", "fp8", "--tp-size", "1", "--drafts", "0", "--chunk", "8192"]
    out = tmp_path / "plan.json"
    common = ["plan", "--devices", "16", "--input-len", "32768", *fixed]
    dispatches = ["--moe-dispatch", "all_gather", "--decode-dispatch", "all_to_all"]
    main([*common, *dispatches, "--tpot", "0.03", "--json", str(out)])
    shown = capsys.readouterr().out
    assert "Together" in shown and "Split" in shown and "Not known" in shown and "H200 SXM data sheet" in shown
    plans = json.loads(out.read_text())
    assert plans["together"]["tpot_ms"] <= 30 and plans["split"]["split"]
    for plan in (plans["together"], plans["split"]):
        used = [plan[phase]["deployment"]["dispatch"] for phase in ("prefill", "decode")]
        assert used == ["all_gather", "all_to_all"]
    main([*common, "--what-if", "tpot", "--json", str(out), "--plot", str(tmp_path / "sweep.png")])
    points = json.loads(out.read_text())["points"]
    rates = [p["together"]["output_tokens_per_s"] for p in points]
    assert rates == sorted(rates), "more time a token, more tokens a second"
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    for wrong, message in (
        (["--device", "H2000"], "no device is named"),
        (["--devices", "0"], "above 0"),
        (["--ttft", "nan"], "--ttft must be above 0"),
        (["--tp-size", "0"], "--tp-size must be above 0"),
        (["--chunk", "0"], "--chunk must be above 0"),
        (["--drafts", "9"], "--drafts must be one of"),
        (["--hf-overrides", '{"num_nextn_predict_layers": 0}', "--drafts", "1"], "no MTP module"),
        (["--plot", str(tmp_path / "x.png")], "--what-if"),
        (["--acceptance", "2"], "acceptance"),
        (["--cp-size", "3", "--what-if", "tpot"], "cannot be cut"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", *fixed, *wrong])
        assert message in capsys.readouterr().err
    assert device_named("h200") is H200
