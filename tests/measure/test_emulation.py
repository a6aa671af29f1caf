"""One rank of many in one process: refused options, results of its groups, and measurements.

Compared with a real run: distributed/scripts/test_emulation.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_engine import LLM, SamplingParams
from dsa_engine.commands.bench.generation_benchmark import measure_latency
from dsa_engine.commands.bench.prefill_benchmark import measure_prefill
from dsa_engine.config.released import released_config
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.measure.emulation.mesh import EmulatedMesh, follow_steps
from dsa_engine.measure.emulation.overlap_model import watched
from dsa_engine.measure.random_prompt import random_prompt
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.collective_log import Collective, CollectiveLog
from dsa_engine.parallel.links import Links

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
        ({"emulate_rank": 1}, "emulate_rank must be one of the ranks 0 … 0 of emulate_world 1, not 1"),
        ({"expert_loads": (1.0,)}, "expert_loads need an emulate_world of at least 2"),
        (
            {"emulate_world": 2, "expert_loads": ()},
            "expert_loads must be numbers of at least 0, and one above it, not ()",
        ),
        ({"emulate_world": 2, "expert_loads": (0, 0)}, "expert_loads must be numbers of at least 0, and one above it"),
        ({"emulate_world": 2, "expert_loads": (1, -1)}, "expert_loads must be numbers of at least 0"),
        ({"emulate_world": 2, "expert_loads": ("1",)}, "expert_loads must be numbers of at least 0"),
        ({"emulate_world": 2, "expert_loads": (float("nan"),)}, "expert_loads must be numbers of at least 0"),
        ({"emulate_world": 2, "machine_size": 0}, "machine_size must be a positive integer, not 0"),
        ({"emulate_world": 2, "cp_size": 0}, "cp_size must be a positive integer, not 0"),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        EmulatedConfig(**keys)
    assert message in str(error.value)


def test_production_knows_no_emulation() -> None:
    with pytest.raises(TypeError, match="emulate_world"):
        ParallelConfig(emulate_world=64)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"emulate_world": 6, "cp_size": 4}, "cp_size 4 does not divide the world size 6"),
        ({"emulate_world": 6, "tp_size": 5}, "tp_size 5 does not divide the world size 6"),
        ({"emulate_world": 25}, "n_routed_experts 24 cannot be divided over 25 ranks: each holds at least one"),
        ({"emulate_world": 24, "tp_size": 24}, "vocab_size 320 cannot be divided over 24 ranks"),
    ],
)
def test_worlds_that_do_not_divide(keys: dict[str, Any], message: str, demo_cache: Path) -> None:
    with pytest.raises(ValueError, match=message):
        LLM("demo-random", device="cpu", parallel=EmulatedConfig(**keys))


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "WORLD_SIZE"])
def test_torchrun_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match="emulate_world 64 runs one rank in one process; start it without torchrun"):
        EmulatedConfig(emulate_world=64).create_mesh("cpu")


def test_groups_have_their_size_and_rank() -> None:
    mesh = EmulatedConfig(emulate_world=64, emulate_rank=21, cp_size=16, tp_size=8).create_mesh("cpu")
    assert isinstance(mesh, EmulatedMesh)
    assert (mesh.rank, mesh.world_size, mesh.is_leader) == (21, 64, True)
    assert mesh.world.ranks == tuple(range(64)) and mesh.world.index == 21
    assert mesh.machines == tuple(rank // 8 for rank in range(64))
    assert mesh.ep.ranks == tuple(range(64)) and mesh.ep.index == 21
    assert mesh.cp.ranks == tuple(range(16, 32)) and mesh.cp.index == 5
    assert mesh.tp.ranks == tuple(range(16, 24)) and mesh.tp.index == 5
    alone = EmulatedConfig(emulate_world=1).create_mesh("cpu")
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


def test_rows_that_only_others_add_to_are_made_up() -> None:
    group = EmulatedGroup((0, 1), 1, None)
    rows = torch.zeros(8, 6)
    rows[5] = 7.0
    part = group.reduce_scatter(rows)
    assert part.shape == (4, 6) and torch.equal(part[1], rows[5])
    assert bool(part.any(dim=-1).all()) and len(part.unique(dim=0)) == 4


def test_messages_are_counted_and_come_from_nowhere() -> None:
    log = CollectiveLog()
    group = EmulatedGroup((4, 5, 6), 1, None, log=log)
    group.send(torch.zeros(3, 2), 2)
    assert group.recv(torch.ones(5), 0).tolist() == [1.0] * 5
    assert [(c.kind, c.sent, c.received) for c in log.collectives] == [
        ("send", (0, 0, 24), (0, 0, 0)),
        ("recv", (0, 0, 0), (20, 0, 0)),
    ]
    assert group.bytes_sent == 24


def test_neighbours_on_several_machines_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="tp_size 8: ranks 0 to 7 share embedding, .* but not a machine"):
        EmulatedConfig(emulate_world=16, tp_size=8, machine_size=4).create_mesh("cpu")


@pytest.fixture(scope="module")
def emulated(demo_cache: Path) -> LLM:
    parallel = EmulatedConfig(emulate_world=8, emulate_rank=2, tp_size=2)
    llm = LLM("demo-random", device="cpu", max_model_len=1024, parallel=parallel, progress=False)
    follow_steps(llm.engine)
    return llm


def test_the_rank_holds_its_part(emulated: LLM) -> None:
    (moe,) = {layer.moe.experts.count for layer in emulated.engine.model.layers if layer.moe is not None}
    assert moe == 24 // 8
    assert emulated.engine.model.embed.shape[0] == 320 // 2
    assert emulated.engine.cache.pages > 0


def test_generate_runs_and_leaves_nothing(emulated: LLM) -> None:
    """Ten sequences on eight ranks: some ranks decode two, and the tokens of the others are made up."""
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
    gathers = [c for c in one.log.collectives if c.stage == "communication"]
    assert len(gathers) == 4 and {c.ranks for c in gathers} == {tuple(range(8))}
    assert one.stand_ins > 0 and "emulation" not in one.stage_seconds()
    communication = one.communication(Links())
    assert 0 < communication.stalled_seconds <= communication.seconds
    assert all(group.log is None for group in emulated.engine.mesh.groups)


def test_fp8_cache_rows_travel_in_their_bytes(tmp_path: Path) -> None:
    """DeepSeek-V3.2's sizes: 656 + 132 bytes per row, padded to 800, against 1,408 in bfloat16."""
    small = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "intermediate_size": 32,
        "moe_intermediate_size": 32,
        "n_routed_experts": 16,
        "vocab_size": 128,
        "index_n_heads": 4,
        "index_topk": 16,
    }
    raw = {k: v for k, v in released_config("deepseek_v32").items() if k != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw | small))
    gathered = {}
    for caches in ("auto", "fp8"):
        options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": caches, "load_format": "dummy"}
        parallel = EmulatedConfig(emulate_world=4)
        llm = LLM(tmp_path, device="cpu", max_model_len=256, parallel=parallel, progress=False, **options)
        follow_steps(llm.engine)
        with watched(llm.engine) as one:
            assert bool(torch.isfinite(llm.engine.prefill([i % 100 for i in range(200)])).all())
        assert one.log is not None
        gathered[caches] = {c.sent for c in one.log.collectives if c.stage == "communication"}
    # Each rank sends the rows of its 50 tokens to each of the three others.
    assert gathered == {"auto": {(0, *[50 * 1408] * 3)}, "fp8": {(0, *[50 * 800] * 3)}}


def test_copies_of_fp8_cache_rows_have_scales_of_their_own() -> None:
    """Equal keys would make equal scores; the rest of a row is not changed."""
    group = EmulatedGroup((0, 1, 2), 1, None, scale_at=8)
    rows = torch.zeros(5, 16, dtype=torch.uint8)
    rows[:, :8] = torch.arange(40).view(5, 8)
    rows[:, 8:12] = torch.arange(1, 6, dtype=torch.float32)[:, None].view(torch.uint8)
    got = group.all_gather(rows)
    assert torch.equal(got[:, :8], rows[:, :8].repeat(3, 1)) and not got[:, 12:].any()
    assert torch.equal(got[5:10], rows)
    scales = got[:, 8:12].contiguous().view(torch.float32)
    assert len(scales.unique()) == 15 and bool((scales > 0).all())
    latents = torch.ones(2, 8, dtype=torch.uint8)  # rows of a layer without index keys
    assert torch.equal(group.all_gather(latents), torch.ones(6, 8, dtype=torch.uint8))


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
    # Embedding, o_proj (2 for each of 4 layers), experts (a gather and a sum for each of 3), LM head and its rows,
    # sampled tokens.
    assert round(slow.tpot.communication.seconds) == 1 + 2 * 4 + 2 * 3 + 2 + 1


def test_wrong_number_of_loads_is_said_at_the_first_layer(demo_cache: Path) -> None:
    parallel = EmulatedConfig(emulate_world=2, expert_loads=(1.0, 2.0))
    llm = LLM("demo-random", device="cpu", parallel=parallel)
    with pytest.raises(ValueError, match="there are 2 expert loads, the model has 24 routed experts"):
        llm.engine.prefill([5, 6, 7])
