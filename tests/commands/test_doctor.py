"""``dsa-engine doctor``: on this CPU, on a fake device, and with faults."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.cli import main
from dsa_engine.commands.doctor import checks as doctor
from dsa_engine.commands.doctor.checks import check_device, check_room, doctor_mesh
from dsa_engine.commands.doctor.finding import NotHere, Unwell
from dsa_engine.kernels.runtime import cpu, operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from fake_cuda import FakeConfig, FakeDevice


@pytest.mark.skipif(INTERPRETED, reason="the kernels of a whole model take minutes in the interpreter")
def test_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu", "--json", str(tmp_path / "d.json")])
    out, err = capsys.readouterr()
    assert "weights loaded" not in err, "nothing but its findings, and warnings"
    result = json.loads((tmp_path / "d.json").read_text())
    states = {finding["check"]: finding["ok"] for finding in result["findings"]}
    assert states.pop("room") is not False  # None where no released model fits
    assert states == {
        "versions": True, "device": True, "links": None, "tokens": True,
        "kernels": True if cpu.library() else None,
    }  # fmt: skip
    assert "✓ tokens    the demo model gives the same tokens: eager; alone and in a batch" in out
    assert "– links     one rank has no links; start it under torchrun" in out and "✗" not in out


def test_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unwell(mesh: Mesh) -> str:
        raise Unwell("the fan is loud", "clean it")

    def broken(mesh: Mesh) -> str:
        raise RuntimeError("no such device\nand a long text")

    def differs(mesh: Mesh) -> str:
        raise ValueError("the ranks were started differently; start all of them alike")

    def elsewhere(mesh: Mesh) -> str:
        raise NotHere("nothing to see")

    checks = {"fan": unwell, "door": broken, "roof": elsewhere, "floor": lambda mesh: "dry", "walls": differs}
    monkeypatch.setattr(doctor, "CHECKS", checks)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--device", "cpu"])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗ fan") and "the fan is loud" in lines[0] and lines[1].endswith("what to do: clean it")
    assert "RuntimeError: no such device" in lines[2] and "long text" not in lines[2] and "dsa-engine env" in lines[3]
    assert lines[4].startswith("– roof") and lines[5].startswith("✓ floor")
    assert lines[6].endswith("start all of them alike") and len(lines) == 7, "no report of what says its remedy"


def test_what_was_found_before_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check that never ends is interrupted; and a device that a kernel has lost is not blamed on later checks."""

    def hangs(mesh: Mesh) -> str:
        raise KeyboardInterrupt

    def breaks_the_device(mesh: Mesh) -> str:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    report = tmp_path / "d.json"
    monkeypatch.setattr(doctor, "CHECKS", {"floor": lambda mesh: "dry", "fan": hangs})
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--device", "cpu", "--json", str(report)])
    result = json.loads(report.read_text())
    assert ended.value.code == 130 and not result["complete"]
    assert [finding["check"] for finding in result["findings"]] == ["floor"]
    monkeypatch.setattr(doctor, "CHECKS", {"kernels": breaks_the_device, "tokens": lambda mesh: pytest.fail("tried")})
    monkeypatch.setattr(doctor, "is_lost", lambda device: True)
    with pytest.raises(SystemExit):
        main(["doctor", "--device", "cpu", "--json", str(report)])
    result = json.loads(report.read_text())
    assert result["complete"] and [finding["ok"] for finding in result["findings"]] == [False, None]
    shown = capsys.readouterr().out
    assert "– tokens    not looked at: the device is in an error since the check of kernels" in shown


def test_no_tick_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsa_engine.commands.doctor.checks.rank_weight_bytes", lambda *_: 10**15)
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), world_size=1)
    with pytest.raises(NotHere, match="^no released model fits, the demo models do; 1 rank.*does not fit"):
        check_room(mesh)


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
def test_on_a_fake_device() -> None:
    with FakeDevice(memory=141 * 10**9) as device:
        mesh = FakeConfig(device=device, world=8).create_mesh("cuda")
        assert check_device(mesh) == "fake sm_90, sm_90, 131.32 GiB of 131.32 GiB free"
        assert re.search(r"deepseek_v32 in FP8 takes 9\d\.\d+ GiB a rank and fits, with", check_room(mesh))
        taken = torch.empty(40 << 30, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(Unwell, match=r"only 91\.32 GiB of 131\.32 GiB are free") as raised:
            check_device(mesh)
        assert "nvidia-smi" in raised.value.advice
        del taken
    with FakeDevice(capability=75) as device, pytest.raises(Unwell, match="is sm_75"):
        check_device(FakeConfig(device=device).create_mesh("cuda"))


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "dsa_engine", "doctor", "--device", "cpu", "--json", str(tmp_path / "d.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("✓ links") == 1 and "2 ranks on 1 machine(s): all-gather" in done.stdout
    assert {f["check"]: f["ok"] for f in json.loads((tmp_path / "d.json").read_text())["findings"]}["tokens"] is True


def test_only_links_are_given_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compile kernels, one from a warm cache and one not, are minutes apart."""
    mesh, made = doctor_mesh("cpu"), []
    monkeypatch.setattr(doctor.dist, "new_group", lambda ranks, timeout: made.append(timeout.total_seconds()))
    doctor._links_group(mesh)
    assert (mesh.config.timeout, made) == (600.0, [60.0])


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
def test_kernels_are_compared_before_they_are_captured_and_named_before_they_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that hangs in a graph, or at its first run, would hang the doctor without a name."""
    graphs = []

    def steps(model: Any, *rest: Any) -> Iterator[str]:
        watched = operation._watching
        assert watched is not None
        watched.before("topk")
        assert "topk runs for the first time" in capsys.readouterr().err
        yield "prefill"

    def start(folder: Path, options: EngineOptions) -> Any:
        graphs.append(not options.enforce_eager)
        return SimpleNamespace(config=None, model=None, cache=SimpleNamespace(format=None))

    monkeypatch.setattr(doctor, "start", start)
    monkeypatch.setattr(doctor, "trial_tokens", lambda config: 1)
    monkeypatch.setattr(doctor, "try_steps", steps)
    with FakeDevice() as device:
        doctor.check_kernels(FakeConfig(device=device).create_mesh("cuda"))
    assert graphs == [False]


def test_a_rank_without_a_compiler_has_compared_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = SimpleNamespace(config=None, model=None, cache=SimpleNamespace(format=None))
    monkeypatch.setattr(doctor, "_engine", lambda mesh: nullcontext(engine))
    monkeypatch.setattr(doctor, "trial_tokens", lambda config: 1)
    monkeypatch.setattr(doctor, "try_steps", lambda *args: [])
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), cp_size=1, all_gather_int=lambda mine: [mine, 1])
    assert doctor.check_kernels(mesh).startswith("0 operations equal")
