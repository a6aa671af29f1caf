"""A rank that fails ends the whole run: soon, with its own error first, and with one traceback."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

Failing = Callable[[str], subprocess.CompletedProcess[str]]
OF_TORCHRUN, REPORT_OF_TORCHRUN = " torch/distributed/elastic/", f"{'=' * 60}\n"


@pytest.fixture(scope="module")
def failing(torchrun: Callable[..., subprocess.CompletedProcess[str]], oracle: Callable[..., object]) -> Failing:
    """Starts ``failing.py`` on three ranks; every run must end long before the default timeout of 600 s."""
    return lambda how: started_by(torchrun, how, oracle)


@pytest.fixture(scope="module")
def failing_alone(
    fork_ranks: Callable[..., subprocess.CompletedProcess[str]], oracle: Callable[..., object]
) -> Failing:
    """The same, where the launcher has no part."""
    return lambda how: started_by(fork_ranks, how, oracle)


def started_by(launch: Callable[..., Any], how: str, oracle: Callable[..., Any]) -> subprocess.CompletedProcess[str]:
    started = time.monotonic()
    done = launch(3, "failing.py", how, oracle("deepseek_v32").folder, timeout=120)
    print(f"{how}: {time.monotonic() - started:.1f} s\n{done.stderr}")
    assert done.returncode != 0
    return done


def said_by_ranks(done: subprocess.CompletedProcess[str]) -> str:
    """The ranks' output to stderr, without their log, and without torchrun's lines and report."""
    lines = done.stderr.partition(REPORT_OF_TORCHRUN)[0].splitlines()
    return "\n".join(one for one in lines if not one.startswith("[dsa_engine rank ") and OF_TORCHRUN not in one)


def test_the_error_of_a_rank_is_shown_first(failing: Failing) -> None:
    done = failing("one_rank_raises")
    said = said_by_ranks(done)
    assert said.startswith("[rank 1] failed and ends the run:\nTraceback (most recent call last):\n")
    assert "ValueError: the third step \\udcff\nof rank 1 was too much for it\n" in said + "\n", "encoded somehow"
    assert said.count("Traceback") == 1, "the transport errors of the others are not shown"
    assert "the third step" in done.stderr.split("Root Cause")[1], "torchrun's report has the error"
    # torchrun may have ended the others before they say anything.
    assert said.count("shown, because") == said.count("shown, because rank 1: ValueError: the third step \\udcff")
    assert "rank 1 has begun" in done.stdout, "what was printed before is not lost"


@pytest.mark.parametrize(
    ("how", "shown"),
    [
        ("one_rank_is_killed", "Signal 9"),
        pytest.param("one_rank_is_killed_of_a_context", "Signal 9", marks=pytest.mark.slow),
        ("one_rank_leaves", "exitcode  : 3"),
    ],
)
def test_a_rank_that_vanishes_ends_the_run(how: str, shown: str, failing: Failing) -> None:
    done = failing(how)
    report = done.stderr.split("Root Cause")[1]
    assert "rank      : 1 (local_rank: 1)" in report and shown in report
    for line in said_by_ranks(done).splitlines():  # torchrun may have ended both others before they say anything
        if line.startswith("[rank ") and "no word from" in line:
            assert re.search("no word from rank (0, )?1(, 2)?: ended", line)


def test_an_interrupt_needs_no_traceback(failing: Failing) -> None:
    said = said_by_ranks(failing("one_rank_is_interrupted"))
    assert said.startswith("[rank 1] interrupted")
    assert "Traceback" not in said


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_run_after_the_timeout(failing: Failing) -> None:
    """Of those that hold contexts together."""
    said = said_by_ranks(failing("one_rank_stops_of_a_context"))
    assert re.match(r"\[rank [02]\] failed and ends the run", said) and "Timed out waiting 5000ms" in said


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(failing: Failing) -> None:
    said = said_by_ranks(failing("one_rank_hangs"))
    assert "failed and ends the run" in said.splitlines()[0]
    assert "Timed out waiting 5000ms" in said
    assert said.count("Traceback") == 1


def test_a_rank_that_leaves_while_weights_load_ends_the_run_after_the_timeout(failing: Failing) -> None:
    said = said_by_ranks(failing("while_weights_load"))
    assert "TimeoutError: no sign of life from rank 1 for 4 s: ended, or stopped" in said
    assert said.count("Traceback") == 1 and "life from rank 2" not in said


@pytest.mark.parametrize("how", ["rank_0_leaves", pytest.param("rank_0_stops", marks=pytest.mark.slow)])
def test_rank_0_with_the_store_of_the_run(how: str, failing_alone: Failing) -> None:
    """No launcher keeps it: the others end when rank 0 has ended without an error, or is stopped."""
    said = said_by_ranks(failing_alone(how))
    if how == "rank_0_stops":
        why = "because the store of the run, which rank 0 has, is silent for 4 s: stopped"
        assert all(f"[rank {rank}] ends, {why}" in said for rank in (1, 2)) and "Traceback" not in said
    else:
        assert "[rank 1] failed and ends the run" in said or "[rank 2] failed and ends the run" in said


def test_an_error_of_all_ranks_can_be_caught_and_is_shown_once(failing_alone: Failing) -> None:
    done = failing_alone("all_alike")
    said = said_by_ranks(done)
    assert [f"rank {rank} goes on" in done.stdout for rank in range(3)] == [True] * 3
    assert said.count("Traceback") == 1
    assert "ValueError: token id 100000 is out of range" in said


def test_ranks_that_differ_are_told_in_what(failing_alone: Failing) -> None:
    done = failing_alone("ranks_that_differ")
    digest = "[0-9a-f]{16}"
    for what, message in (
        ("checkpoint", f"the checkpoint's files is {digest} on rank 0, 2 and {digest} on rank 1"),
        ("layout", "tp_size is 3 on rank 0, 2 and 1 on rank 1; timeout is 60 on rank 0, 2 and 50 on rank 1"),
        ("layers", 'hf_overrides is {"num_hidden_layers": 3} on rank 0, 2 and {"num_hidden_layers": 2} on rank 1'),
        ("benchmark", f"the digest of the prompts is {digest} on rank 0, 1 and {digest} on rank 2"),
    ):
        for rank in range(3):
            assert re.search(rf"rank {rank} {what}: .*{message}", done.stdout), (rank, what, done.stdout)
    assert "RuntimeError: the end" in done.stderr


def test_what_one_part_refuses_is_refused_by_all(failing_alone: Failing) -> None:
    """With ``prefill_ranks``, at each step of the start: no rank waits for those that have refused."""
    done = failing_alone("one_part_refuses")
    for what, message in (
        ("facts", "ValueError: the ranks were started differently: seed is 0 on rank 0, 2 and 1 on rank 1"),
        ("rebalance", "ValueError: rebalance_every 3: experts move between ranks, and there is only one"),
        ("record", "ValueError: cannot write /dev/null/loads.json"),
        ("events", "ValueError: kv_events_config: endpoint"),
        ("loads", "ValueError: expert_loads: cannot read nowhere.json"),
        ("replicas", "ValueError: redundant_experts 1000"),
        ("host", "ValueError: host_cache_memory 1 is 1 bytes"),
        ("caches", "CapacityError: the cache is too small"),
        ("folder", "ValueError: cache_folder '/dev/null/pages' cannot be made"),
        ("record of all", "ValueError: cannot write /dev/null/loads.json"),
    ):
        told = [line.partition(f" {what}: ")[2] for line in done.stdout.splitlines() if f" {what}: " in line]
        assert len(told) == 3 and len(set(told)) == 1 and told[0].startswith(message), (what, told)
    assert "RuntimeError: the end" in done.stderr


def test_an_interrupt_that_is_caught_concerns_one_rank(failing_alone: Failing) -> None:
    done = failing_alone("an_interrupt_is_caught")
    for rank, became in enumerate(("was not interrupted", "was interrupted", "was not interrupted")):
        assert f"rank {rank} {became}" in done.stdout and f"rank {rank} goes on" in done.stdout
    assert "RuntimeError: the end" in done.stderr


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no_such_model", "CheckpointError: no such model folder"),
        pytest.param("bad_sizes", "ValueError: cp_size 2 does not divide the world size 3", marks=pytest.mark.slow),
        ("too_many_ranks", "ValueError: n_routed_experts 2 cannot be divided over 3 ranks"),
    ],
)
def test_a_wrong_start_is_one_traceback(how: str, message: str, failing: Failing) -> None:
    said = said_by_ranks(failing(how))
    assert said.count("Traceback") == 1
    assert message in said


def test_ranks_that_wait_where_no_exception_arises(
    fork_ranks: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """As in CUDA: only a thread of theirs can end them. No rank ends for being slow."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    done = fork_ranks(3, "stuck.py", tmp_path, timeout=120, store=store.port)
    print(done)
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} is healthy" for rank in range(3)]
    assert done.codes == [1] * 3
    others = [f"[rank {rank}] ends, because rank 0: LookupError: no such expert" for rank in (1, 2)]
    said = [line for line in done.stderr.splitlines() if line not in others]
    assert said[0] == "[rank 0] failed and ends the run:" and said[1].startswith("Traceback"), "and nothing else"
    assert said[-1] == "LookupError: no such expert" and len(said) + 2 == len(done.stderr.splitlines())
