"""The planner: its memory and counted work are those of an engine, its plans keep to what is asked."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine.cli import main
from dsa_engine.commands.planner import predict
from dsa_engine.commands.planner.demand import Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed, stored
from dsa_engine.commands.planner.devices import DEVICES, device_named
from dsa_engine.commands.planner.launch import commands
from dsa_engine.commands.planner.predict import (
    BEST,
    HOST_DECODE,
    HOST_PREFILL,
    OWN,
    PREFILL_LAUNCHES,
    predict_decode,
    predict_prefill,
)
from dsa_engine.commands.planner.search import NothingFits, Planner
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.startup.choice import activation_bytes
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.rank_weights import rank_model, weight_bytes
from dsa_engine.weights.convert.schemes import target_scheme

H200 = DEVICES["H200"]
# Settings that a test need not search.
FIXED: dict[str, Any] = {"weights": "fp8", "cache": "fp8", "tp_size": 1, "chunk": 8192, "drafts": 0}


@pytest.fixture(scope="session")
def config() -> ModelConfig:
    return ModelConfig.from_dict(released_config("deepseek_v32"))


@pytest.mark.parametrize("weights", ["fp8", "bfloat16", "int8", "int4-experts"])
@pytest.mark.parametrize(("ranks", "tp_size", "drafts"), [(8, 1, 0), (48, 8, 1)])
def test_weights_are_those_that_info_counts(
    weights: str, ranks: int, tp_size: int, drafts: int, config: ModelConfig
) -> None:
    placed = Placed(config, H200, Deployment(ranks, tp_size=tp_size, weights=weights, drafts=drafts))
    counted = weight_bytes(rank_model(config, stored(weights, config), torch.bfloat16, ranks, tp_size, drafts))
    assert placed.weight_bytes == counted


@pytest.mark.parametrize(("cache", "drafts"), [("bfloat16", 0), ("fp8", 1)])
def test_a_token_takes_the_bytes_of_the_engines_pages(cache: str, drafts: int) -> None:
    few = ModelConfig.from_dict(released_config("deepseek_v32"), {"num_hidden_layers": 4})
    placed = Placed(few, H200, Deployment(32, cache=cache, drafts=drafts))
    pools = KVCache(few.with_mtp(1) if drafts else few, placed.cache, 2, 16, torch.device("cpu"))
    assert 16 * placed.token_bytes == pools.page_bytes


def test_predictions_grow_as_they_should(config: ModelConfig) -> None:
    placed, demand = Placed(config, H200, Deployment(64, 64, 8, cache="fp8")), Demand(64, 131_072)
    half, whole = (predict_prefill(placed, tokens, OWN) for tokens in (65_536, 131_072))
    assert 2 < whole.seconds / half.seconds < 4, "the indexer grows with the square, all else in proportion"
    few, many = (predict_decode(placed, n, demand, OWN) for n in (64, 512))
    assert few.seconds < many.seconds < 8 * few.seconds
    assert few.room - many.room == pytest.approx(7 * 132_096 * placed.token_bytes, rel=0.01)
    # As many bytes of weights are read by a step with drafts, which brings more tokens.
    drafting = Placed(config, H200, Deployment(64, 64, 8, cache="fp8", drafts=1))
    assert predict_decode(drafting, 64, demand, OWN).seconds < few.seconds
    assert predict_prefill(placed, 131_072, BEST).seconds < whole.seconds


def test_hot_rows(config: ModelConfig) -> None:
    """Index keys of all tokens lie on the device, and latent rows of few; the others take host memory, and what a step
    misses of them the time of PCIe."""
    demand, how = Demand(8, 131_072), Deployment(8, 8, cache="fp8")
    plain, placed = Placed(config, H200, how), Placed(config, H200, replace(how, hot_rows=4096))
    latent = 61 * 656
    assert placed.device_bytes == plain.device_bytes - latent == 61 * 132
    assert placed.cached(1000, 16) == 2 * (1000 * 61 * 132 + 4096 * latent) and plain.spilled(1000, 16) == 0
    assert placed.spilled(1000, 16) == 2 * 1000 * latent
    slower, faster = (predict_decode(one, 16, demand, OWN) for one in (placed, plain))
    fetched = 2 * 0.307 * 2048 * latent / 50e9
    assert slower.seconds - faster.seconds == pytest.approx(fetched) and slower.room > faster.room
    fixed, demand = FIXED | {"cp_size": 8, "dcp_size": 1}, Demand(8, 131_072, requests=96)
    hot = Planner(config, H200, demand, fixed | {"hot_rows": 4096})
    plan = hot.best()
    assert plan.requests == 96 > 2 * Planner(config, H200, demand, fixed).best().requests
    serve = " ".join(commands(hot, plan, "deepseek_v32", "{}", False)["serve"])
    needed = plan.requests / 8 * demand.longest * latent / 2**30
    given = int(re.findall(r"--hot-rows 4096 --host-cache-memory (\d+)GiB", serve)[0])
    assert needed < given < needed + 2.01
    with pytest.raises(ValueError, match="--hot-rows 4096: a step may select 6144 rows"):
        Planner(config, H200, demand, fixed | {"hot_rows": 4096, "drafts": 2})


def test_the_host_is_the_measured_one() -> None:
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "host.json"
    measured = json.loads(path.read_text())
    assert measured["law"] == {"decode": list(HOST_DECODE), "prefill": list(HOST_PREFILL)}
    for one in measured["decode"]:
        own, step = one["requests"], HOST_DECODE[0] + HOST_DECODE[1] * one["requests"]
        assert 1e3 * (step + HOST_DECODE[2] * own * (one["world"] - 1)) == pytest.approx(one["step_ms"], rel=0.5)


def test_a_step_has_the_hosts_time(config: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the device in decode; before it in prefill, whose launches are beside it too."""
    placed, demand = Placed(config, H200, Deployment(64, 64, chunk=2048, cache="fp8")), Demand(64, 65_536)
    monkeypatch.setattr(predict, "HOST_PREFILL", (2e-3, 1e-7))
    planned = 2e-3 + 65_536e-7
    for eager, slower in ((1e-6, False), (1e-3, True)):
        prefill = predict_prefill(placed, 65_536, replace(OWN, eager=eager))
        assert prefill.seconds == pytest.approx(sum(prefill.stages.values()))
        assert (prefill.stages["host"] == prefill.host == pytest.approx(planned)) != slower
        assert not slower or prefill.seconds == pytest.approx(planned + 61 * PREFILL_LAUNCHES * eager), "no halves"
    for of_step, slower in ((1e-6, False), (0.5, True)):
        monkeypatch.setattr(predict, "HOST_DECODE", (of_step, 1e-6, 1e-8))
        decode = predict_decode(placed, 128, demand, OWN)
        assert decode.host == pytest.approx(of_step + 2e-6 + 126e-8)
        assert (decode.stages["host"] > 0) == slower
        assert not slower or decode.seconds == pytest.approx(decode.host)


def test_a_published_deployment(config: ModelConfig) -> None:
    """64 + 64 cards at 128K, the goal of its publishers: TTFT under 2 s, TPOT under 30 ms."""
    placed = Placed(config, H200, Deployment(64, 64, 8, weights="bfloat16", drafts=1))
    assert 0.3 < predict_prefill(placed, 131_072, OWN).seconds < 2
    assert 5e-3 < predict_decode(placed, 64, Demand(64, 131_072), OWN).seconds < 30e-3


def test_the_best_plan_keeps_to_the_load(config: ModelConfig) -> None:
    planner = Planner(config, H200, Demand(32, 32_768, ttft=2.0, tpot=0.04), FIXED)
    plan = planner.best()
    assert plan.misses(planner.demand) == 0 and plan.ttft <= 2 and plan.tpot <= 0.04
    assert plan.instances * plan.decode.how.ranks <= 32 and plan.prefill.room >= 0 and plan.decode.room >= 0
    assert 32 * plan.tokens_per_s == pytest.approx(plan.requests / plan.tpot)
    fast = planner.again(plan, BEST)
    assert fast.ttft < plan.ttft and fast.tpot < plan.tpot
    assert planner.again(plan, OWN) == plan
    assert Planner(config, H200, Demand(32, 32_768, requests=40), FIXED).best().requests >= 40
    assert Planner(config, H200, Demand(64, 2048, requests=96), FIXED).best().requests == 96
    as_shown = Demand(32, 32_768, tpot=1e3 * plan.tpot / 1e3 * (1 - 1e-15))
    assert plan.misses(as_shown) == 0, "no rounding of a float counts as a miss"
    impossible = Demand(32, 131_072, ttft=0.01)
    assert Planner(config, H200, impossible, FIXED).best().misses(impossible) > 10, "the one that misses least"


def test_one_request_needs_no_room_for_a_second_prompt(config: ModelConfig) -> None:
    how = {"weights": "int4-experts", "drafts": 0, "cache": "fp8", "tp_size": 8}
    plan = Planner(config, DEVICES["H100"], Demand(8, 131_072), how).best()
    assert plan.requests == 1 and plan.prefill.room >= 0


def test_a_request_larger_than_a_rank() -> None:
    """Ranks hold it together, as few as it takes; a given number is taken."""
    long = ModelConfig.from_dict(released_config("deepseek_v32"), {"max_position_embeddings": 2**20})
    demand, fixed = Demand(8, 2**20 - 1024), FIXED | {"chunk": 4096}
    plan = (planner := Planner(long, H200, demand, fixed)).best()
    how = plan.decode.how
    assert how.dcp_size == 4 and plan.prefill.how.cp_size == 8 and plan.decode.room >= 0 <= plan.prefill.room
    whole, half = (planner.placed(replace(plan.prefill.how, dcp_size=size)) for size in (1, 2))
    for placed in (whole, half):
        assert predict_prefill(placed, demand.input_len, OWN).room < 0
    assert whole.cached(2**20, 8) == half.cached(2**20, 8) == 2**20 * whole.token_bytes
    assert whole.cached(2**20, 1) == 2 * half.cached(2**20, 1)
    assert whole.prefilled(2**20) == 2**20 * whole.token_bytes < 2 * half.prefilled(2**20)
    assert "context parallelism" in plan.prefill.stages and "context parallelism" in plan.decode.stages
    words = commands(planner, plan, "deepseek_v32", "{}", dummy=True)["serve"]
    assert words[words.index("--dcp-size") + 1] == "4"
    assert Planner(long, H200, demand, fixed | {"dcp_size": 8}).best().decode.how.dcp_size == 8
    short = Planner(long, H200, Demand(8, 8192), fixed)
    best = short.best()
    assert best.decode.how.dcp_size == 1 and "context parallelism" not in best.decode.stages
    assert "--dcp-size" not in commands(short, best, "deepseek_v32", "{}", dummy=True)["serve"]


def test_what_does_not_fit_says_by_how_much(config: ModelConfig) -> None:
    """671 billion parameters in bfloat16 on 8 × 80 GB."""
    with pytest.raises(NothingFits, match=r"lacks \d+\.\d GiB on each of 8 ranks, with bfloat16 weights"):
        Planner(config, DEVICES["H100"], Demand(8, 8192), {**FIXED, "weights": "bfloat16"}).best()
    with pytest.raises(ValueError, match="tp_size 7"):
        Planner(config, H200, Demand(8, 8192), {**FIXED, "tp_size": 7}).best()
    with pytest.raises(NothingFits, match="--devices 257 .* nothing fixed: .* at most 256"):
        Planner(config, H200, Demand(257, 8192)).best()


def test_formats_that_change_numbers_are_not_chosen(config: ModelConfig) -> None:
    how = {"tp_size": 1, "chunk": 4096, "drafts": 0}
    with pytest.raises(NothingFits, match=r"with fp8 weights and fp8 caches; .* fewer bits \(--weights, --cache\)"):
        Planner(config, DEVICES["H100"], Demand(8, 8192), how).best()
    released = {**released_config("deepseek_v32"), "num_hidden_layers": 8}
    plain = ModelConfig.from_dict(released | {"quantization_config": None})
    best = Planner(plain, H200, Demand(8, 8192), how).best().decode.how
    assert (best.weights, best.cache) == ("bfloat16", "bfloat16")
    int8 = ModelConfig.from_dict(released | {"quantization_config": target_scheme("int8", plain).config})
    assert Planner(int8, H200, Demand(8, 8192), how).best().decode.how.weights == "int8"
    with pytest.raises(ValueError, match="--weights fp8: the checkpoint's are int8, which cannot be converted"):
        Planner(int8, H200, Demand(8, 8192), {**how, "weights": "fp8"})


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = ["--weights", "fp8", "--cache", "fp8", "--tp-size", "1", "--drafts", "0", "--chunk", "8192"]
    out = tmp_path / "plan.json"
    main(["plan", "--devices", "16", "--input-len", "32768", *fixed, "--tpot", "0.03", "--json", str(out)])
    shown = capsys.readouterr().out
    assert (
        "modelled" in shown and "host in decode, ms" in shown and "TTFT, s" in shown and "H200 SXM data sheet" in shown
    )
    assert re.search(r"free memory on a rank, GiB +[1-9]\d\n", shown), "modelled: no hundredths"
    plan = json.loads(out.read_text())
    assert plan["modelled"] and plan["tpot_ms"][0] < plan["tpot_ms"][1] <= 30
    assert plan["decode"]["how"]["weights"] == "fp8"
    for wrong, message in (
        (["--device", "H2000"], "--device 'H2000'"),
        (["--devices", "0"], "--devices must be above 0"),
        (["--ttft", "nan"], "--ttft must be above 0"),
        (["--tp-size", "0"], "--tp-size must be above 0"),
        (["--chunk", "0"], "--chunk must be above 0"),
        (["--hf-overrides", '{"num_nextn_predict_layers": 0}', "--drafts", "1"], "no MTP module"),
        (["--acceptance", "2"], "--acceptance"),
        (["--acceptance", "x"], "--acceptance"),
        (["--input-len", "200000"], "--input-len 200000"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", *fixed, *wrong])
        assert message in capsys.readouterr().err
    assert device_named("h200") is H200


def test_activations_grow_with_tokens_and_width() -> None:
    config = ModelConfig.from_dict(released_config("deepseek_v32"))
    one = activation_bytes(config, 1, 1, torch.bfloat16)
    assert activation_bytes(config, 1000, 1000, torch.bfloat16) == 1000 * one
    # Tokens gathered from other ranks count: rows twice, in and out, and their float32 sums.
    more = activation_bytes(config, 1, 64, torch.bfloat16)
    assert more - one == 63 * config.hidden_size * (2 * 2 + 4)
    # The widest sets of a DeepSeek layer: absorbed queries and results of 128 heads, or 8 experts' inputs and outputs.
    assert one >= 2 * 128 * (576 + 512)
