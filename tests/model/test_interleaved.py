"""The order of passes through the layers."""

from __future__ import annotations

from dsa_engine.model.interleaved import Pass, run_interleaved


def test_passes_run_round_robin_up_to_their_transfers() -> None:
    ran: list[str] = []

    def one(name: str, transfers: int) -> Pass[str]:
        for number in range(transfers):
            ran.append(f"{name}{number}")
            yield "MoE dispatch"
        ran.append(f"{name} end")
        return name

    assert run_interleaved([one("a", 2), one("b", 2)]) == ["a", "b"]
    assert ran == ["a0", "b0", "a1", "b1", "a end", "b end"]
    ran.clear()
    assert run_interleaved([one("a", 2)]) == ["a"]
    assert ran == ["a0", "a1", "a end"]
