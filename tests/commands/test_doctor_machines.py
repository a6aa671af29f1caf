"""The comparison of machines by ``dsa-engine doctor``: the odd one is named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsa_engine.commands.doctor import machines
from dsa_engine.commands.doctor.finding import Unwell
from dsa_engine.commands.doctor.machines import odd_ones, rounds_of_pairs, slow_machines

HOSTS = ["a", "a", "b", "b", "c", "c"]


def gathers(monkeypatch: pytest.MonkeyPatch, **other: str) -> None:
    """Six ranks on three machines: this process's facts everywhere, and ``other`` on machine c."""

    def gather(mesh: Any, mine: dict[str, str]) -> list[dict[str, str]]:
        names = dict(zip(other, mine, strict=False))  # the first fact, whatever its name
        return [mine] * 4 + [mine | {names[key]: text for key, text in other.items()}] * 2

    monkeypatch.setattr(machines, "_gather", gather)
    monkeypatch.setattr(machines, "host_names", lambda mesh: HOSTS)


def test_the_odd_machine_is_named() -> None:
    facts = [{"torch": "2.11", "NCCL": "2.27"}] * 4 + [{"torch": "2.12", "NCCL": "2.27"}] * 2
    assert odd_ones(facts, HOSTS) == ["torch: 2.12 on c, 2.11 elsewhere"]
    assert odd_ones(facts[2:], HOSTS[2:]) == ["torch: 2.11 on b, 2.12 on c"], "no majority"
    assert odd_ones([*facts[:2], {"torch": "2.11"}], HOSTS) == ["NCCL: not known on b, 2.27 elsewhere"]


def test_files_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    gathers(monkeypatch)
    assert "3 machine(s) are alike in dsa_engine, Python, torch" in machines.check_software(mesh)
    (tmp_path / "config.json").write_text("{}")
    assert "config.json" in machines.check_files(mesh, str(tmp_path))
    assert "--model DIR" in machines.check_files(mesh, None)
    with pytest.raises(Unwell, match=f"^on no machine: no folder {tmp_path}/none$"):
        machines.check_files(mesh, str(tmp_path / "none"))
    gathers(monkeypatch, first="0.0.1")
    with pytest.raises(Unwell, match=r"^dsa_engine: 0\.0\.1 on c, .* elsewhere$"):
        machines.check_software(mesh)
    with pytest.raises(Unwell, match=r"^the source of dsa_engine: 0\.0\.1 on c, .* elsewhere$"):
        machines.check_files(mesh, None)


@pytest.mark.parametrize("fast", [0.0, 3.0, -3.0])
def test_a_clock(monkeypatch: pytest.MonkeyPatch, fast: float) -> None:
    """The last machine's clock differs; in the first round a rank comes late."""
    monkeypatch.setattr(machines, "host_names", lambda mesh: HOSTS)
    rounds = iter(range(100))

    def all_gather_int(now: int) -> Sequence[int]:
        late = 5_000_000 * (now != 0 and next(rounds) == 0)
        return [now + late, now, now, now, now + int(fast * 1e6), now + int(fast * 1e6)]

    mesh: Any = SimpleNamespace(all_gather_int=all_gather_int)
    if not fast:
        assert machines.check_clocks(mesh) == "differ by 0.000 s at most"
    else:
        with pytest.raises(Unwell, match=rf"^the clock of c is 3\.0 s {'fast' if fast > 0 else 'slow'}$"):
            machines.check_clocks(mesh)


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_pair_is_measured_once_and_apart(count: int) -> None:
    rounds = rounds_of_pairs(count)
    pairs = [pair for each in rounds for pair in each]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for each in rounds:
        members = [machine for pair in each for machine in pair]
        assert len(members) == len(set(members))


def test_a_slow_machine() -> None:
    assert slow_machines({"a": [10, 1], "b": [10, 1], "c": [1, 1]}) == {"c": 1}
    assert slow_machines({"a": [1.0], "b": [1.0]}) == {}, "which of two is slow is not known"
    assert slow_machines({"a": [10, 9], "b": [10, 8], "c": [9, 8]}) == {}
