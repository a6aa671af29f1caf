"""The file of expert loads, and the placements that follow from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dsa_engine.engine.startup.start_facts import start_facts
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import ParallelConfig
from dsa_engine.parallel.disaggregation import create_mesh
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.counts import ExpertCounts
from dsa_engine.parallel.experts.layer_placements import LayerPlacements

GOOD: dict[str, Any] = {"version": 1, "model": "m", "layers": [3, 5], "loads": [[1, 2.5, 0], [0, 0, 0]]}


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(ExpertCounts("m", (3, 5), ((1.0, 2.5, 0.0), (0.0, 0.0, 0.0))).text())
    loads = ExpertCounts.read(path)
    assert json.loads(path.read_text()) == GOOD and [*tmp_path.iterdir()] == [path]
    assert (loads.experts, loads.of_layer(3)) == (3, (1.0, 2.5, 0.0))
    assert loads.of_layer(5) is None and loads.of_layer(4) is None, "equal loads"
    path.write_text(json.dumps(GOOD | {"steps": 7}))
    assert ExpertCounts.read(path) == loads, "keys of other programs"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loads": None}, "loads"),
        ({"loads": [[1, 2, 3]]}, "each of 2 layers"),
        ({"loads": [[1, 2, 3], [1, 2]]}, r"\[3, 2\]"),
        ({"loads": [[1, 2, 3], [1, float("nan"), 3]]}, "expert 1 in layer 5"),
        ({"loads": [[1, 2, 3], [1, 2, -3]]}, "expert 2 in layer 5 .* not -3"),
        ({"loads": [[1, "a", 3], [1, 2, 3]]}, "expert 1 in layer 3"),
        ({"layers": [5, 3]}, r"\[5, 3\]"),
        ({"layers": [-5, 3]}, "layers"),
        ({"layers": []}, "layers"),
        ({"version": 2}, "version 2 is not 1"),
    ],
)
def test_bad_content(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "loads.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=f"expert_loads: .*loads.json.*{message}"):
        ExpertCounts.read(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON"),
        ("[1, 2]", "JSON object with version, model, layers, loads"),
        ('{"version": 1}', "model"),
        (b"\xff", "decode"),
        (None, "No such file or directory"),
    ],
)
def test_no_such_file(tmp_path: Path, text: str | bytes | None, message: str) -> None:
    path = tmp_path / "loads.json"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ValueError, match=f"expert_loads: .*{message}"):
        ExpertCounts.read(path)


def placements(ranks: int, **options: Any) -> LayerPlacements:
    return LayerPlacements.of(ParallelConfig(**options), [0] * ranks)


def test_each_layer_has_its_placement(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    heavy = [(9.0, *(1.0,) * 11), (*(1.0,) * 11, 9.0)]
    path.write_text(ExpertCounts("m", (1, 2, 3), (*heavy, heavy[0])).text())
    options = {"expert_loads": path, "redundant_experts": 4}
    ranks = placements(3, **options)
    for layer, loads in ((1, heavy[0]), (2, heavy[1]), (3, heavy[0]), (4, (1.0,) * 12)):
        held = ranks.held(12, layer, groups=1)
        assert [len(experts) for experts in held] == [6, 5, 5] and imbalance(loads, held) < 1.15
        heaviest = loads.index(max(loads))
        assert max(loads) == 1.0 or all(heaviest in experts for experts in held)
    assert placements(3, expert_loads=heavy[0], redundant_experts=4).held(12, 7, 1) == ranks.held(12, 1, 1)
    mesh = create_mesh(EmulatedConfig(emulate_world=3, emulate_rank=1, **options), "cpu")
    first, second, again = (mesh.experts.of_layer(12, layer) for layer in (1, 2, 3))
    assert again is first and second is not first and first.held == ranks.held(12, 1, 1)[1]


def test_loads_alone_move_experts() -> None:
    loads = (5.0, 5.0, 1.0, 1.0)
    assert placements(2).held(4, 0, groups=1) == ((0, 1), (2, 3))
    assert imbalance(loads, placements(2, expert_loads=loads).held(4, 0, groups=1)) == 1.0


def test_nodes_matter_to_the_dispatch_by_nodes_only() -> None:
    loads = [1.0 + expert for expert in range(16)]
    by_node = LayerPlacements(4, 2, 4, loads).held(16, 0, groups=4)
    assert all(len({expert // 4 for rank in half for expert in rank}) == 2 for half in (by_node[:2], by_node[2:]))
    options = ParallelConfig(redundant_experts=4, expert_loads=tuple(loads))
    other = LayerPlacements.of(options, [0, 0, 1, 1]).held(16, 0, groups=4)
    assert other == LayerPlacements(4, 1, 4, loads).held(16, 0, groups=4) != by_node
    for one in (replace(options, moe_dispatch="by_node"), replace(options, decode_dispatch="auto")):
        assert LayerPlacements.of(one, [0, 0, 1, 1]).held(16, 0, groups=4) == by_node
        assert LayerPlacements.of(one, [0, 1, 0, 1]).held(16, 0, groups=4) == other, "nodes of consecutive ranks"


def test_replicas_let_more_ranks_than_experts_run() -> None:
    assert sorted(placements(5, redundant_experts=1).held(4, 0, groups=1)) == [(0,), (0,), (1,), (2,), (3,)]


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (1, {"redundant_experts": 1}, "redundant_experts 1: 4 routed experts on 1 ranks need at least 0.* at most 0"),
        (3, {"redundant_experts": 9}, "redundant_experts 9: 4 routed experts on 3 ranks need .* at most 8, so that"),
        (6, {"redundant_experts": 1}, "redundant_experts 1: 4 routed experts on 6 ranks need at least 2, so that"),
        (2, {"expert_loads": (1.0, 2.0)}, "expert_loads have loads of 2 experts, the model has 4 routed experts"),
        (2, {"expert_loads": "/nowhere/loads.json"}, "cannot read /nowhere/loads.json: No such file"),
    ],
)
def test_options_that_do_not_fit(world: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        placements(world, **options).held(4, 0, groups=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"redundant_experts": -1}, "redundant_experts must be an integer of at least 0, not -1"),
        ({"expert_loads": ""}, "expert_loads must be .*, not ''"),
        ({"expert_loads": 3}, "expert_loads must be .*, not 3"),
        ({"expert_loads": (0.0, 0.0)}, "expert_loads must be .* above 0"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelConfig(**options)


def test_ranks_compare_the_content_and_not_the_path(tmp_path: Path) -> None:
    """Nodes may have the file in different folders."""
    facts = []
    for name, load in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        path = tmp_path / name
        path.write_text(ExpertCounts("m", (3,), ((1.0, load),)).text())
        options = EngineOptions("m", load_format="dummy", parallel=ParallelConfig(expert_loads=path))
        facts.append(start_facts(tmp_path, options))
    assert facts[0] == facts[1] and {key for key in facts[0] if facts[0][key] != facts[2][key]} == {"expert_loads"}
