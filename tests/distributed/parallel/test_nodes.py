"""Runs over several nodes, which are namespaces of this one: equal tokens, and the end of a run that loses one."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import emulate_nodes
from dsa_engine import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[3]
LOADED = "weights loaded on this rank"
Emulate = Callable[..., "subprocess.CompletedProcess[str]"]


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "emulate_nodes.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.fixture(scope="module")
def emulate(demo_cache: Path) -> Emulate:
    """``emulate(*arguments)``: the finished run, with the output of all nodes."""
    if reason := emulate_nodes.why_not():
        pytest.skip(reason)

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        process = start(*arguments)
        try:
            out, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail(process.communicate()[0])
        return subprocess.CompletedProcess(process.args, process.returncode, out, "")

    return run


def requests(lengths: Sequence[int]) -> list[list[Any]]:
    """Greedy ones, and seeded ones with penalties."""
    rng, always = random.Random(7), {"max_tokens": 12, "ignore_eos": True}
    kinds = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "presence_penalty": 0.5}]
    prompts = [[rng.randrange(4, 320) for _ in range(length)] for length in lengths]
    return [[prompt, always | kinds[number % 2]] for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("nodes", "ranks", "prefill"),
    [(2, 1, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 2, 2), (4, 1, 2)))],
)
def test_one_engine_and_two_parts(nodes: int, ranks: int, prefill: int, emulate: Emulate, tmp_path: Path) -> None:
    """Tokens are those of one process. The kernel counts the pages on the links of the nodes that prefill: all of
    them, once, and a little more for headers and messages."""
    options = {"model": "demo-random", "max_model_len": 128, "page_size": 8, "cache_memory": "4MiB"}
    generate = requests((115, 5, 90, 16))
    case = {"options": options, "generate": generate, "timeout": 120}
    (tmp_path / "case.json").write_text(json.dumps(case))
    words = ["tests/distributed/programs/nodes_worker.py", prefill, tmp_path / "case.json", tmp_path]
    done = emulate("--nodes", nodes, "--ranks", ranks, "--slow-link", "200mbit", "--", *words)
    assert done.returncode == 0, done.stdout
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(nodes * ranks)]
    with LLM(**options, device="cpu") as llm:
        alone = llm.generate([one[0] for one in generate], [SamplingParams(**one[1]) for one in generate])
    assert results[0]["disaggregated"] == results[0]["one engine"] == [one.outputs[0].token_ids for one in alone]
    pages = sum(-(-len(prompt) // 8) for prompt, _ in generate) * results[0]["page_bytes"]
    assert sum(one["sent"] for one in results) == sum(one["received"] for one in results) == pages
    assert all(one["lost"] == 0 for one in results)
    on_links = sum(one["link"] for one in results[:prefill:ranks])
    print(f"{pages:,} bytes of pages, {on_links:,} on the links")
    assert pages < on_links
    assert on_links < 1.2 * pages or prefill > ranks, "only ranks of one context-parallel group send each other rows"


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "ranks", "prefill"), [(2, 2, 0), (2, 1, 1), (4, 1, 2)])
def test_serve(nodes: int, ranks: int, prefill: int, emulate: Emulate, tmp_path: Path) -> None:
    answer = tmp_path / "answer.json"
    shape = ["--nodes", nodes, "--ranks", ranks, "--rdzv-backend", "static", "--"]
    options = ["--prefill-ranks", prefill] if prefill else []
    done = emulate(*shape, "tests/distributed/programs/node_server.py", answer, 8123, *options)
    assert done.returncode == 0, done.stdout
    (choice,) = json.loads(answer.read_text())["choices"]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    assert choice["text"] == LLM("demo", device="cpu").generate([[5, 6, 7] * 50], params)[0].text


@pytest.mark.slow
@pytest.mark.parametrize("odd", ["file", "version"])
def test_doctor_names_the_odd_node(odd: str, emulate: Emulate, tmp_path: Path) -> None:
    """And accuses no other. An engine does not start on nodes with different versions."""
    model = tmp_path / "model"
    for name, weights in (("model", b"weights"), ("other", b"Weights")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    if odd == "file":
        change = (model, tmp_path / "other")
        wrong = [rf"nodes +the files of {model}: \w+ on node-2, \w+ elsewhere"]
    else:
        change = (ROOT / "dsa_engine" / "version.py", tmp_path / "version.py")
        change[1].write_text('__version__ = "0.0.0"\n')
        wrong = [r"nodes +dsa_engine: 0\.0\.0 on node-2, [\d.]+ elsewhere$"]
        wrong += [rf"{check} +ValueError: .* on rank 0, 1 and 0\.0\.0 on rank 2" for check in ("kernels", "tokens")]
    words = ["tests/distributed/programs/command.py", "--odd", "node-2", *change]
    done = emulate("--nodes", 3, "--", *words, "doctor", "--device", "cpu", "--model", model)
    assert done.returncode != 0
    said = [line.removeprefix("node-0: ") for line in done.stdout.splitlines()]
    accused = [line.removeprefix("✗ ") for line in said if line.startswith("✗")]
    assert len(accused) == len(wrong) and all(map(re.match, wrong, accused)), done.stdout
    assert not any("report it" in line for line in said)


def check_loss(done: subprocess.CompletedProcess[str], lost: int, how: str) -> None:
    """The run has ended with its error, and names the ranks of the lost node, which has one, and no others."""
    said = [line for line in done.stdout.splitlines() if not line.startswith(f"node-{lost}: ")]
    print(*(line for line in said if "[rank" in line), sep="\n")
    assert done.returncode == 1, done.stdout
    assert f"emulate_nodes: node-{lost} is lost ({how})" in said
    if lost > 0:
        assert re.findall(r"no word from rank (.*?): ended", "\n".join(said)) == [str(lost)], done.stdout
    else:  # after a kill torchrun sees the loss at once too, and may have ended the rank before it says anything
        reason = r"\[rank \d+\] failed and ends the run"
        reason += "|Connection was likely closed|RendezvousConnectionError" if how == "kill" else ""
        assert any(re.search(reason, line) for line in said), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "kill"])
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_disappears_ends_the_run(lost: int, how: str, emulate: Emulate) -> None:
    """Node 0 has the store of the run; its loss leaves no process to ask for a reason."""
    loss = ["--lose", how, "--lose-at", LOADED, "--lost-node", lost]
    options = ["--input-len", 256, "--warmup", 0, "--repeat", 100_000, "--device", "cpu", "--timeout", 15]
    done = emulate(*loss, "--", "scripts/bench_prefill.py", *options)
    check_loss(done, lost, how)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "kill"])
@pytest.mark.parametrize(
    ("nodes", "prefill", "lost", "backend"),
    [(2, 1, 0, "static"), (2, 1, 1, "c10d"), (4, 2, 1, "static"), (4, 2, 3, "c10d")],
)
def test_a_node_that_disappears_while_pages_travel(
    nodes: int, prefill: int, lost: int, backend: str, how: str, emulate: Emulate, tmp_path: Path
) -> None:
    """A node of either side, with the leader of its side or without."""
    options = {"model": "demo-random", "max_model_len": 512, "page_size": 8, "cache_memory": "16MiB"}
    case = {"options": options, "generate": requests([400] * 6), "timeout": 15, "endless": True}
    (tmp_path / "case.json").write_text(json.dumps(case))
    loss = ["--lose", how, "--lose-at", "pages are on their way", "--lost-node", lost]
    words = ["tests/distributed/programs/nodes_worker.py", prefill, tmp_path / "case.json", tmp_path]
    done = emulate("--nodes", nodes, "--slow-link", "10mbit", "--rdzv-backend", backend, *loss, "--", *words)
    check_loss(done, lost, how)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_remains(number: signal.Signals, emulate: Emulate) -> None:
    """The processes inside hold the script's output open, so its end is theirs."""
    options = ["--input-len", 256, "--repeat", 100_000, "--device", "cpu", "--warmup", 0]
    process = start("--", "scripts/bench_prefill.py", *options)
    assert process.stdout is not None
    assert any(LOADED in line for line in process.stdout)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
