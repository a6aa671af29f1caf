"""``dsa-engine experts``: what is drawn, counted and refused."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dsa_engine.cli import main
from dsa_engine.commands.experts import LayerLoads, heat_map, layer_loads
from dsa_engine.parallel.experts.balance import imbalance
from dsa_engine.parallel.experts.layer_placements import LayerPlacements
from dsa_engine.parallel.experts.loads_file import ExpertLoads

SKEWED = (8.0, 1.0, 1.0, 1.0, 1.0, 0.0, 2.0, 2.0)
LOADS = ExpertLoads("some model", (3, 11), (SKEWED, (0.0,) * 8))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    LOADS.write(tmp_path / "loads.json")
    return tmp_path / "loads.json"


def test_map_table_report_and_plot(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    report, plot = tmp_path / "report.json", tmp_path / "map.png"
    files = ["--json", str(report), "--plot", str(plot)]
    main(["experts", str(path), "--ranks", "4", "--redundant-experts", "4", *files])
    out = capsys.readouterr().out
    assert "some model: 2 layers, 8 experts in each" in out and "\x1b" not in out
    assert "\n3      %:::: ==\n11     ========\n" in out
    in_order, planned = 9 / 4, imbalance(SKEWED, LayerPlacements(4, redundant=4, loads=path).held(8, 3, 1))
    row = next(line.split() for line in out.splitlines() if line.startswith("3 ") and "%" not in line)
    assert row == ["3", "0", "4.00", f"{in_order:.2f}", f"{planned:.2f}"] and planned < 1.2
    first, second = json.loads(report.read_text())["layers"]
    assert first["rank_max_over_mean"] == pytest.approx({"in_order": in_order, "planned": planned})
    assert (first["busiest"], first["relative_loads"]) == (0, [load / 2 for load in SKEWED])
    assert second["rank_max_over_mean"]["in_order"] == 1.0, "no loads count as equal ones"
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_map_fits_the_terminal() -> None:
    wide = LayerLoads(7, tuple(1.0 + (expert == 100) for expert in range(256)), None, None)
    lines = heat_map([wide], 60, colored=False)
    assert lines[0].split(maxsplit=1)[1] == "a character is 5 experts" and max(map(len, lines[:2])) <= 60
    assert lines[1].split(maxsplit=1)[1] == "=" * 20 + "*" + "=" * 31
    colored = heat_map([wide], 60, colored=True)[1]
    assert colored.count("\x1b[48;5;") == 52 and colored.count("\x1b[48;5;71m") == 1


def test_more_ranks_than_experts_have_no_order() -> None:
    (first, _) = layer_loads(LOADS, ranks=9, redundant=4)
    assert first.in_order is None and first.planned is not None


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (None, [], "cannot read .*loads.json: No such file"),
        ("{", [], "loads.json is not valid JSON"),
        ("[1, 2]", [], "must hold a JSON object with version, model, layers, loads"),
        ("", ["--redundant-experts", "4"], "--redundant-experts 4 needs --ranks"),
        ("", ["--ranks", "0"], "--ranks must be at least 1, not 0"),
        ("", ["--ranks", "2", "--redundant-experts", "-1"], "--redundant-experts must be at least 0, not -1"),
        ("", ["--ranks", "9"], "8 routed experts on 9 ranks need at least 1"),
        ("", ["--json", "/nowhere/a.json"], "cannot write /nowhere/a.json: there is no folder /nowhere"),
        ("", ["--plot", "map.svg"], "plots are PNG files; give a name that ends in .png"),
    ],
)
def test_refusals(
    text: str | None, options: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is None:
        os.unlink(path)
    elif text:
        path.write_text(text)
    with pytest.raises(SystemExit):
        main(["experts", str(path), *options])
    error = capsys.readouterr().err

    assert re.search(message, error) and "Traceback" not in error
