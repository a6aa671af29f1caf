"""``dsa-engine doctor``: on this CPU, on a fake device, and with faults."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsa_engine.cli import main
from dsa_engine.commands.doctor import checks as doctor
from dsa_engine.commands.doctor.checks import NotHere, Unwell, check_device, check_nodes, differences
from dsa_engine.kernels.runtime import cpu, libraries, operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.disaggregation import create_mesh
from fake_cuda import FakeConfig, FakeDevice


@pytest.mark.skipif(INTERPRETED, reason="the kernels of a whole model take minutes in the interpreter")
def test_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--device", "cpu", "--json", str(tmp_path / "d.json")])
    out, err = capsys.readouterr()
    assert "weights loaded" not in err, "nothing but its findings, and warnings"
    result = json.loads((tmp_path / "d.json").read_text())
    kernels = True if cpu.library() else None
    assert result["complete"] and {finding["check"]: finding["ok"] for finding in result["results"]} == {
        "packages": True, "device": True, "exchange": None, "kernels": kernels, "tokens": True,
    }  # fmt: skip
    assert "✓ tokens    the demo model gives the same tokens: eager; eager, alone" in out
    assert "– exchange  there is one rank" in out and "✗" not in out


def test_deep_ep_is_named_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh: Any = None
    for installed in ((), ("deep_ep",)):
        monkeypatch.setattr(libraries, "is_installed", lambda module, installed=installed: module in installed)
        assert ("DeepEP (moe_dispatch, decode_dispatch 'deep_ep')" in doctor.check_packages(mesh)) == bool(installed)


def test_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def raises(error: BaseException) -> Callable[[Mesh], str]:
        def check(mesh: Mesh) -> str:
            raise error

        return check

    report = tmp_path / "d.json"
    checks = {
        "fan": raises(Unwell("the fan is loud", "clean it")),
        "door": raises(RuntimeError("no such device\nand a long text")),
        "roof": raises(NotHere("nothing to see")),
        "floor": lambda mesh: "dry",
        "walls": raises(ValueError("the ranks were started differently; start all of them alike")),
    }
    monkeypatch.setattr(doctor, "CHECKS", checks)
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--device", "cpu", "--json", str(report)])
    assert ended.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✗ fan") and "the fan is loud" in lines[0] and lines[1].endswith("what to do: clean it")
    assert "RuntimeError: no such device" in lines[2] and "long text" not in lines[2] and "dsa-engine env" in lines[3]
    assert lines[4].startswith("– roof") and lines[5].startswith("✓ floor")
    assert lines[6].endswith("start all of them alike") and len(lines) == 7, "no report of what says its remedy"
    monkeypatch.setattr(doctor, "CHECKS", {"floor": checks["floor"], "hangs": raises(KeyboardInterrupt())})
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--device", "cpu", "--json", str(report)])
    result = json.loads(report.read_text())
    assert ended.value.code == 130 and not result["complete"] and len(result["results"]) == 1


def test_without_the_characters_of_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(mesh: Mesh) -> str:
        raise NotHere("no roof")

    monkeypatch.setattr(doctor, "CHECKS", {"floor": lambda mesh: "dry, 3 × 4 m", "roof": lacks})
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "ascii"))
    main(["doctor", "--device", "cpu"])
    assert written.getvalue().decode().split("\n") == ["ok floor     dry, 3 ? 4 m", "-- roof      no roof", ""]


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
def test_on_a_fake_device() -> None:
    with FakeDevice(memory=141 * 10**9) as device:
        mesh = create_mesh(FakeConfig(device=device, world=8), "cuda")
        seen = check_device(mesh)
        assert seen.startswith("fake sm_90, sm_90, driver ") and seen.endswith(", 131.32 GiB of 131.32 GiB free")
        taken = torch.empty(40 << 30, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(Unwell, match=r"91\.32 GiB of 131\.32 GiB") as raised:
            check_device(mesh)
        assert "nvidia-smi" in raised.value.advice
        del taken
    with FakeDevice(capability=75) as device, pytest.raises(Unwell, match="sm_75"):
        check_device(create_mesh(FakeConfig(device=device), "cuda"))


def test_the_odd_node_is_named(tmp_path: Path) -> None:
    facts = [("a", {"torch": "2.11"}), ("a", {"torch": "2.11"}), ("b", {"torch": "2.11"}), ("c", {"torch": "2.12"})]
    assert differences(facts) == ["torch: 2.12 on c, 2.11 elsewhere"] and differences(facts[:3]) == []
    host = SimpleNamespace(all_gather_object=lambda mine: [mine, mine])
    mesh: Any = SimpleNamespace(device=torch.device("cpu"), host=host)
    (tmp_path / "config.json").write_text("{}")
    assert f"the files of {tmp_path}" in check_nodes(mesh, str(tmp_path))
    name = f"the files of {tmp_path}"
    host.all_gather_object = lambda mine: [mine, mine, ("odd", {**mine[1], name: "other"})]
    with pytest.raises(Unwell, match=f"^{name}: other on odd, .* elsewhere$"):
        check_nodes(mesh, str(tmp_path))


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command += ["-m", "dsa_engine", "doctor", "--device", "cpu", "--json", str(tmp_path / "d.json")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("✓ exchange") == 1 and "2 ranks on 1 node(s)" in done.stdout
    assert {f["check"]: f["ok"] for f in json.loads((tmp_path / "d.json").read_text())["results"]}["tokens"] is True


@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="needs a device that is not there")
def test_kernels_are_compared_before_they_are_captured_and_named_before_they_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kernel that hangs in a graph, or at its first run, would hang the doctor without a name."""
    graphs = []

    def steps(model: Any, *rest: Any) -> Iterator[str]:
        watched = operation._of_thread.watching
        assert watched is not None
        watched.before("topk")
        assert "topk runs for the first time" in capsys.readouterr().err
        yield "prefill"

    def start(folder: Path, options: EngineOptions) -> Any:
        graphs.append(not options.enforce_eager)
        return SimpleNamespace(config=None, model=None, cache=SimpleNamespace(format=None)), None

    monkeypatch.setattr(doctor, "start", start)
    monkeypatch.setattr(doctor, "trial_tokens", lambda config: 1)
    monkeypatch.setattr(doctor, "try_steps", steps)
    with FakeDevice() as device:
        doctor.check_kernels(create_mesh(FakeConfig(device=device), "cuda"))
    assert graphs == [False]
