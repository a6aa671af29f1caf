"""The README and the docs: what they name exists, command lines parse, the first example runs."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from dsa_engine.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ROOM_PAGES = sorted((ROOT / "docs" / "architecture").glob("*.md"))
PAGES = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *ROOM_PAGES)

ENDINGS = r"(?:py|md|cpp|json|jsonl|png|sh|toml)"

# Files of checkpoints, results of commands on the pages, and files of other projects.
NOT_OURS = {
    "/openapi.json",
    "config.json",
    "encoding_dsv32.py",
    "generation_config.json",
    "message/",
    "program.py",
}


def without_blocks(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def paths(page: Path) -> Iterator[str]:
    """Files and folders that a page names in code quotes, and scripts in its commands."""
    for quoted in re.findall(r"`([^`\n]+)`", without_blocks(page)):
        for word in quoted.replace(",", " ").split():
            word = word.removesuffix(":")
            if re.fullmatch(rf"[\w./*-]+\.{ENDINGS}", word) or re.fullmatch(r"[\w-]+(/[\w-]+)*/", word):
                yield word
    for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S):
        yield from re.findall(r"\bscripts/[\w/]+\.(?:py|sh)", block)


@functools.cache
def files(path: str) -> list[Path]:
    """The files or folders of the repository whose paths end in what a page names."""
    tops = ("dsa_engine", "kernels", "parallel", "scripts", "tests", "docs", "benchmarks")
    return [*ROOT.glob(path), *(file for top in tops for file in (ROOT / top).rglob(path.rstrip("/")))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", without_blocks(page)) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert sorted({path for path in paths(page) if path not in NOT_OURS and not files(path)}) == []
    for path, name in re.findall(r"`([\w/]+\.py): ([\w.]+)`", without_blocks(page)):
        assert any(name in file.read_text(encoding="utf-8") for file in files(path)), f"{path}: {name}"


def command_lines(text: str) -> Iterator[tuple[str, list[str]]]:
    """The commands of ``dsa-engine`` that a text quotes, or that stand in its blocks, with their options."""
    quoted = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S) + re.findall(r"`([^`\n]+)`", text)
    for code in quoted:
        for name, rest in re.findall(
            r"(?:dsa-engine|dsa_engine) ((?:bench )?[a-z-]+)([^\n|#]*)", code.replace("\\\n", "")
        ):
            if name in COMMANDS:
                yield name, re.findall(r"(?<=\s)--[a-z-]+", rest)


def options_of(name: str) -> set[str]:
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_arguments(parser)
    return {option for action in parser._actions for option in action.option_strings}


SERVING = ROOT / "docs" / "serving"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_options_of_commands_exist(page: Path) -> None:
    for name, options in command_lines(page.read_text(encoding="utf-8")):
        assert set(options) <= options_of(name), name


def test_serving_names_what_there_is() -> None:
    """Commands and options of docs/SERVING.md and of the files that it comes with; the addresses that probes ask."""
    page = (ROOT / "docs" / "SERVING.md").read_text(encoding="utf-8")
    assert "serve" in {name for name, _ in command_lines(page)}
    assert set(re.findall(r"`(--[a-z-]+)`", page)) <= options_of("serve")
    unit, image = ((SERVING / name).read_text(encoding="utf-8") for name in ("dsa-engine.service", "Dockerfile"))
    (start,) = re.findall(r"^ExecStart=.* -m dsa_engine serve (.*)$", unit, re.M)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", image, re.M)
    deployment, service = yaml.safe_load_all((SERVING / "kubernetes.yaml").read_text(encoding="utf-8"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    for words in (start.split(), [*json.loads(entry)[6:], *container["args"]]):
        parser = argparse.ArgumentParser()
        COMMANDS["serve"].add_arguments(parser)
        assert parser.parse_args(words).model_tag == "/srv/DeepSeek-V3.2"
    routes = (ROOT / "dsa_engine" / "server" / "app.py").read_text(encoding="utf-8")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'@app.get("{container[probe]["httpGet"]["path"]}")' in routes
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_the_first_example(demo_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in the README, on a CPU."""
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.S)
    exec(compile(block.replace('LLM("demo")', 'LLM("demo", device="cpu", progress=False)'), str(README), "exec"), {})
    assert "length" in capsys.readouterr().out


CLUSTERS = ROOT / "docs" / "clusters"


def start(tmp_path: Path, *command: str) -> list[list[str]]:
    """The words of every torchrun that a recipe starts; Slurm has two tasks here."""
    programs = {
        "torchrun": 'echo "$NCCL_SOCKET_IFNAME" "$@"',
        "scontrol": "echo node1; echo node2",
        "srun": 'shift 2; for n in 0 1; do SLURM_NODEID=$n "$@"; done',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]"}
    node = {"NODES": "2", "NUMBER": "1", "FIRST_HOST": "node1", "NETWORK": "ib0"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | (slurm if "bash" in command else node)
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, check=True, cwd=ROOT)
    return [line.split() for line in done.stdout.splitlines()]


def test_recipes_for_clusters(tmp_path: Path) -> None:
    """The files of docs/CLUSTERS.md are well formed, and start torchrun with commands and options that exist. Every
    node has its number, and the first one serves."""
    serve = ["-m", "dsa_engine", "serve", "/srv/DeepSeek-V3.2", "--tp-size=8", "--kv-cache-dtype=fp8", "--host=0.0.0.0"]
    (by_hand,) = start(tmp_path, "sh", "docs/clusters/start.sh", *serve)
    assert by_hand.pop(0) == "ib0"
    slurm = start(tmp_path, "bash", "docs/clusters/dsa-engine.sbatch", *serve)
    assert [words[-4:] for words in slurm[:2]] == [["dsa_engine", "doctor", "--device", "cuda"]] * 2
    together, service = yaml.safe_load_all((CLUSTERS / "leaderworkerset.yaml").read_text(encoding="utf-8"))
    template = together["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    (container,) = template["spec"]["containers"]
    assert set(template["metadata"]["labels"].items()) <= set(service["spec"]["selector"].items())
    pods = [[word.replace("$(LWS_GROUP_SIZE)", "2") for word in container["args"]]]
    pods = [[word.replace("$(LWS_WORKER_INDEX)", number) for word in pods[0]] for number in "01"]
    for launched, number in ((by_hand, 1), (slurm[2], 0), (slurm[3], 1), (pods[0], 0), (pods[1], 1)):
        parsed = get_args_parser().parse_args(launched)
        assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend, parsed.module) == ("2", "8", "static", True)
        assert (parsed.node_rank, parsed.rdzv_endpoint, parsed.training_script) == (number, "", "dsa_engine")
        assert parsed.master_addr in ("node1", "$(LWS_LEADER_ADDRESS)") and parsed.training_script_args == serve[2:]
    parser = argparse.ArgumentParser()
    COMMANDS["serve"].add_arguments(parser)
    assert parser.parse_args(serve[3:]).model_tag == "/srv/DeepSeek-V3.2"
    commands = [pair for file in CLUSTERS.iterdir() for pair in command_lines(f"```\n{file.read_text()}\n```")]
    for name, options in commands:
        assert set(options) <= options_of(name), name
