"""Rank 0 makes the calls of all ranks: the others get its outputs and its errors, or follow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams

RANKS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def results(
    fork_ranks: Callable[..., subprocess.CompletedProcess[str]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What each rank got."""
    folder = tmp_path_factory.mktemp("calls")
    done = fork_ranks(RANKS, "same_calls.py", folder, timeout=200)
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_gets_the_outputs_of_rank_0(results: list[dict[str, Any]], demo_random: LLM) -> None:
    first = results[0]
    for what in ("generate", "chat", "stream", "left", "logits", "reset", "after"):
        assert [result[what] for result in results] == [first[what]] * RANKS, what
    wanted = demo_random.generate([[5, 6], [7], [9, 8]], GREEDY)
    first_two, pieces = first["gathered"][:2], first["gathered"][2]
    assert [*first_two, [token for piece in pieces for token in piece]] == [out.token_ids for out in wanted]
    assert len(pieces) > 1 and first["stream"][-1][2] == "length" and len(first["generate"][0][0]) == 8


def test_every_rank_gets_the_errors_of_rank_0(results: list[dict[str, Any]]) -> None:
    first = results[0]["errors"]
    assert "ValueError: prompts[1]" in first["token"] and "1000000" in first["token"] and "256" in first["length"]
    for result in results[1:]:
        errors = result["errors"]
        for what in ("token", "length", "empty", "token of logits", "length of logits", "empty of logits"):
            assert errors[what] == first[what]
        assert errors["local"] == "RuntimeError: rank 0 has left this call before its end: Local: not sent"
        assert errors["interrupt"] == "RuntimeError: rank 0 has left this call before its end: KeyboardInterrupt: "
        assert errors["left"].startswith("RuntimeError: rank 0 has left this call before its end")
        assert "in the thread that made the LLM" in errors["thread"]
        assert "rank 0 calls in event loops" in result["in an event loop"]
        assert "the LLM has been closed" in result["closed"] and "follow()" in result["followed"]


def test_first_calls_at_once_while_the_others_follow(results: list[dict[str, Any]], demo_random: LLM) -> None:
    """In a second engine and a third one of the program too."""
    prompts = [[5, 6, number] for number in range(4, 7)]
    wanted = [out.token_ids for out in demo_random.generate(prompts, GREEDY)]
    assert results[0]["at once"] == [wanted, wanted]
