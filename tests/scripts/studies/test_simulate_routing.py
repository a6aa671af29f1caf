"""The simulation of routing rules: a replica's times, its cache, traffic, and that the router's rule is worth it."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from routing_simulation.replicas import Replica, ReplicaModel, Request
from routing_simulation.routers import ROUTERS
from routing_simulation.simulation import simulate
from routing_simulation.traffic import BLOCK_TOKENS, Conversation, Traffic, Turn

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "studies" / "simulate_routing.py"
MODEL = ReplicaModel(
    prefill_tokens_per_s=1000, chunk_tokens=1000, decode_step_s=1, decode_request_s=0.5, cached_tokens=4096
)


def turn(name: str, tokens: int, output_tokens: int = 1) -> Turn:
    blocks = tuple(f"{name} {i}".encode() for i in range(tokens // BLOCK_TOKENS))
    return Turn(tokens, output_tokens, 0.0, blocks, blocks)


def run_alone(*arrivals: tuple[float, Turn]) -> tuple[list[Request], Replica]:
    """Requests that arrive at a replica, when it has all that came before; the times of their first tokens."""
    replica, requests, pending = Replica(MODEL), [], sorted(arrivals, key=lambda one: one[0])
    while pending or replica.step_ends_s is not None:
        if pending and (replica.step_ends_s is None or pending[0][0] < replica.step_ends_s):
            now, one = pending.pop(0)
            requests.append(Request(one, now))
            replica.add(requests[-1], now)
        else:
            replica.end_step()
    return requests, replica


def test_steps_of_a_replica() -> None:
    """First come, first served; prefill and decode steps alternate; short prompts share a step."""
    (long, first, second), replica = run_alone(
        (0.0, turn("a", 2000, 4)), (0.1, turn("b", 300, 1)), (0.2, turn("c", 400, 1))
    )
    assert long.first_token_s == 2.0  # two chunks
    assert first.first_token_s == second.first_token_s == pytest.approx(2.0 + 1.5 + 0.7)  # a decode step, then both
    # Then a step of three requests that decode, and two steps of the one that remains.
    assert replica.busy_s == pytest.approx(4.2 + 2.5 + 2 * 1.5) and replica.prefilled_tokens == 2700


def test_a_series_of_decode_steps_ends_for_a_new_request() -> None:
    (_, late), _ = run_alone((0.0, turn("a", 1000, 100)), (5.0, turn("b", 500)))
    assert late.first_token_s == pytest.approx(1.0 + 3 * 1.5 + 0.5)


def test_the_cache_of_a_replica() -> None:
    """A prompt that is being computed is waited for; of a cache that is too small the oldest blocks are lost."""
    requests, _ = run_alone(
        (0.0, turn("a", 2048)), (0.1, turn("a", 2048)), (20.0, turn("b", 4096)), (40.0, turn("a", 2048))
    )
    assert [request.hit_tokens for request in requests] == [0, 2047, 0, 0]


def test_traffic_is_seeded_and_has_all_lengths() -> None:
    traffic = Traffic(rate=5.0, duration_s=200.0, seed=3)
    made = traffic.conversations()
    assert made == traffic.conversations() != Traffic(rate=5.0, duration_s=200.0, seed=4).conversations()
    assert 800 < len(made) < 1200
    turns = [turn for conversation in made for turn in conversation.turns]
    lengths = sorted(turn.prompt_tokens for turn in turns)
    assert lengths[0] < 200 and 100_000 < lengths[-1] <= 131_072
    for one in turns[:200]:
        assert len(one.blocks) == one.prompt_tokens // BLOCK_TOKENS
        assert one.blocks_after[: len(one.blocks)] == one.blocks
    for conversation in made[:100]:
        for before, after in zip(conversation.turns, conversation.turns[1:]):
            assert after.blocks[: len(before.blocks_after)] == before.blocks_after


@pytest.fixture(scope="module")
def conversations() -> list[Conversation]:
    return Traffic(rate=2.0, duration_s=120.0, seed=1).conversations()


def test_the_rule_is_worth_it(conversations: list[Conversation]) -> None:
    """Under load it has more hits and shorter times than both others, for short and for long prompts."""
    model = ReplicaModel()
    results = {name: simulate(conversations, make(4, model.cached_tokens), 4, model) for name, make in ROUTERS.items()}
    ours = results.pop("ours")
    assert ours == simulate(conversations, ROUTERS["ours"](4, model.cached_tokens), 4, model)
    for other in results.values():
        assert other.requests == ours.requests == sum(len(one.turns) for one in conversations)
        assert ours.hit_rate > other.hit_rate + 0.1
        assert ours.ttft_short[1] < other.ttft_short[1] / 2 and ours.ttft_long[1] < other.ttft_long[1]
        assert ours.imbalance < 1.2


def test_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--duration", "20", "--request-rate", "1,2", "--replicas", "2", "--json", str(tmp_path / "a.json")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *words])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    results = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [(one["rate"], one["rule"]) for one in results] == [(rate, rule) for rate in (1.0, 2.0) for rule in ROUTERS]
    assert "ours" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--request-rate", "1,x"])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "--request-rate must be numbers" in capsys.readouterr().err
