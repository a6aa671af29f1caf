"""Acceptance of drafts on the shipped model: the script's measurement, on few and short prompts."""

from __future__ import annotations

from demo_model.evaluation.drafting import TEXT_TOKENS, measure_drafting, report
from demo_model.evaluation.quality import held_out
from dsa_engine import LLM


def test_the_shipped_model_drafts() -> None:
    llm = LLM("demo", device="cpu", max_model_len=1024, max_num_seqs=1, progress=False,
              speculative_config={"num_speculative_tokens": 2})  # fmt: skip
    rows = report(measure_drafting(llm, held_out(llm), 320, 1, [0, 2]))
    assert [(row["kind"], row["num_speculative_tokens"]) for row in rows] == [
        (kind, number) for kind in ("text", "facts", "passages") for number in (0, 2)
    ]
    for row in rows:
        assert row["same_tokens"] == row["generations"] == 1 and row["median_tpot_ms"] > 0
        if row["num_speculative_tokens"]:
            assert 1 < row["mean_acceptance_length"] <= 3 and row["acceptance_rates"][0] >= 0.5
            # Every token is the first of a step, but for those that were accepted.
            accepted = round((row["mean_acceptance_length"] - 1) * row["num_drafts"])
            assert row["tokens"] - accepted - row["num_drafts"] in (1, 2), "the prompt's own, and a last one"
    assert rows[0]["tokens"] == TEXT_TOKENS
