"""One rank of many in one process: refused options, results of its groups, and measurements.

Compared with a real run: distributed/scripts/test_emulation.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Collective, record
from dsa_engine import LLM, SamplingParams
from dsa_engine.config.released import released_config
from dsa_engine.engine.calls.jobs import prefill
from dsa_engine.measure.emulation.config import EmulatedConfig, EmulatedMesh
from dsa_engine.measure.emulation.group import EmulatedGroup
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts.dispatch import Routed, StepSizes


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"emulate_world": 0}, "emulate_world must be .*, not 0"),
        ({"emulate_world": 4, "emulate_rank": 4}, "emulate_rank must be one of the ranks 0 … 3"),
        ({"emulate_world": 2, "node_size": 0}, "node_size"),
        ({"emulate_world": 4, "prefill_ranks": 2}, "prefill_ranks"),
        ({"emulate_world": 4, "rebalance_every": 9}, "rebalance_every"),
        ({"emulate_world": 4, "record_expert_loads": "loads.json"}, "record_expert_loads"),
        ({"emulate_world": 4, "moe_dispatch": "deep_ep"}, "moe_dispatch"),
        ({"emulate_world": 4, "decode_dispatch": "deep_ep"}, "decode_dispatch 'deep_ep' is not emulated"),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmulatedConfig(**keys)


def test_production_knows_no_emulation() -> None:
    with pytest.raises(TypeError, match="emulate_world"):
        ParallelConfig(emulate_world=64)  # type: ignore[call-arg]


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RUN_ID", "WORLD_SIZE"])
def test_torchrun_is_refused(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(ValueError, match="emulate_world 64 runs one rank in one process; start it without torchrun"):
        create_mesh(EmulatedConfig(emulate_world=64), "cpu")


def test_groups_have_their_size_and_rank() -> None:
    mesh = create_mesh(EmulatedConfig(emulate_world=64, emulate_rank=21, cp_size=16, tp_size=8), "cpu")
    assert isinstance(mesh, EmulatedMesh)
    assert (mesh.rank, mesh.world_size, mesh.is_leader) == (21, 64, True)
    assert mesh.world.ranks == tuple(range(64)) and mesh.world.index == 21
    assert mesh.nodes == tuple(rank // 8 for rank in range(64))
    assert mesh.ep.ranks == tuple(range(64)) and mesh.ep.index == 21
    assert mesh.cp.ranks == tuple(range(16, 32)) and mesh.cp.index == 5
    assert mesh.tp.ranks == tuple(range(16, 24)) and mesh.tp.index == 5
    alone = create_mesh(EmulatedConfig(emulate_world=1), "cpu")
    rows = torch.randn(3, 2)
    assert alone.ep.all_gather(rows) is rows and alone.ep.all_to_all(rows) is rows and alone.ep.bytes_sent == 0
    with pytest.warns(UserWarning, match="tp_size 8: ranks 0 to 7 share embedding, .* but not a node"):
        create_mesh(EmulatedConfig(emulate_world=16, tp_size=8, node_size=4), "cpu")


def test_collectives_have_shapes_bytes_and_own_rows() -> None:
    group = EmulatedGroup((4, 5, 6), 1, None)
    log = record(group)
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
    group.send(torch.zeros(3, 2), 2)
    assert group.recv(torch.ones(5), 0).tolist() == [1.0] * 5
    assert [sum(c.sent) for c in log] == [80, 32, 160, 80, 80, 40, 0, 24, 0] and group.bytes_sent == 496
    kinds = ["all_gather"] * 3 + ["reduce_scatter"] + ["all_to_all"] * 3 + ["send", "recv"]
    assert [c.kind for c in log] == kinds and [c.asynchronous for c in log] == [True] + [False] * 8
    assert log[5] == Collective("all_to_all", (4, 5, 6), 5, (20, 0, 20), (80, 0, 60))


def test_rows_that_only_others_add_to_are_made_up() -> None:
    rows = torch.zeros(8, 6)
    rows[5] = 7.0
    part = EmulatedGroup((0, 1), 1, None).reduce_scatter(rows)
    assert part.shape == (4, 6) and torch.equal(part[1], rows[5])
    assert bool(part.any(dim=-1).all()) and len(part.unique(dim=0)) == 4


@pytest.fixture(scope="module")
def emulated(demo_cache: Path) -> LLM:
    parallel = EmulatedConfig(emulate_world=8, emulate_rank=2, tp_size=2)
    return LLM("demo-random", device="cpu", max_model_len=1024, parallel=parallel, progress=False)


def test_generate_runs_and_leaves_nothing(emulated: LLM) -> None:
    """Ten sequences on eight ranks: some ranks decode two, and the tokens of the others are made up."""
    free = emulated.engine.scheduler.free_pages
    prompts = [[5 + i] * (30 * i + 1) for i in range(10)]
    outs = emulated.generate(prompts, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert [len(out.token_ids) for out in outs] == [5] * 10
    assert all(0 <= token < 320 for out in outs for token in out.token_ids)
    assert emulated.engine.scheduler.free_pages == free
    assert bool(torch.isfinite(prefill(emulated.engine, list(range(4, 250)) * 3)).all())


@pytest.mark.parametrize("method", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("max_pairs", [sys.maxsize, 50])
@pytest.mark.parametrize(("tokens", "padding"), [(64, 0), (1, 0), (3, 2), (0, 0)])
def test_experts_get_equal_parts(method: Any, max_pairs: int, tokens: int, padding: int) -> None:
    """8 ranks with as many tokens each, whatever the router chooses; padding has no experts."""
    mesh = create_mesh(EmulatedConfig(emulate_world=8, emulate_rank=3, moe_dispatch=method), "cpu")
    parallel, count = mesh.experts.of_layer(24, 0), tokens + padding
    chosen = torch.zeros(count, 4, dtype=torch.int32)
    chosen[tokens:] = -1
    routed = Routed(torch.randn(count, 6), chosen, torch.rand(count, 4))
    dispatch = mesh.experts.dispatchers[False].start(parallel, routed, StepSizes(count, max_pairs))
    counts = torch.zeros(3, dtype=torch.int64)
    for number in range(dispatch.rounds):
        here = dispatch.receive(number)
        local = here.local(3)
        assert here.local_pairs in (None, int((local >= 0).sum()))
        counts += local[local >= 0].long().bincount(minlength=3)
        dispatch.send_back(number, torch.randn(len(here.tokens), 6))
    assert dispatch.combine().shape == (count, 6)
    exact = tokens * 4 / 3
    assert max((counts - exact).abs()) < 2 + padding and abs(int(counts.sum()) - 4 * tokens) <= 4 * padding


def test_fp8_cache_rows_travel_in_their_bytes(tmp_path: Path) -> None:
    """DeepSeek-V3.2's sizes: 656 + 132 bytes per row, padded to 800, against 1,408 in bfloat16."""
    small = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "q_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "intermediate_size": 32,
        "moe_intermediate_size": 32, "n_routed_experts": 16, "vocab_size": 128, "index_n_heads": 4, "index_topk": 16,
    }  # fmt: skip
    raw = {k: v for k, v in released_config("deepseek_v32").items() if k != "quantization_config"}
    (tmp_path / "config.json").write_text(json.dumps(raw | small))
    gathered = {}
    for caches in ("auto", "fp8"):
        options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": caches, "load_format": "dummy"}
        parallel = EmulatedConfig(emulate_world=4)
        llm = LLM(tmp_path, device="cpu", max_model_len=256, parallel=parallel, progress=False, **options)
        log = record(llm.engine.mesh.cp)
        assert bool(torch.isfinite(prefill(llm.engine, [i % 100 for i in range(200)])).all())
        gathered[caches] = {c.sent for c in log if c.kind == "all_gather"}
    # Each rank sends the rows of its 50 tokens to each of the three others.
    assert gathered == {"auto": {(0, *[50 * 1408] * 3)}, "fp8": {(0, *[50 * 800] * 3)}}


def test_copies_of_fp8_cache_rows_have_signs_of_their_own() -> None:
    """Equal keys would make equal scores."""
    rows = torch.randint(0, 256, (5, 16), dtype=torch.uint8)
    got = EmulatedGroup((0, 1, 2), 1, None).all_gather(rows).view(3, 5, 16)
    assert torch.equal(got[1], rows) and torch.equal(got & 127, (rows & 127).expand(3, 5, 16))
    assert torch.equal(got[..., 3::4], rows[:, 3::4].expand(3, 5, 4))  # where scales have their sign
    assert not torch.equal(got[0], rows) and not torch.equal(got[2], rows) and not torch.equal(got[0], got[2])
