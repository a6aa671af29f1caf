"""Options and files that a script refuses, each with one line and exit status 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize(
    "script, options, message",
    [
        ("bench_prefill.py", ["--seq-len", "0"], "give positive numbers separated by commas"),
        ("bench_prefill.py", ["--repeat", "0"], "--repeat must be at least 1"),
        ("bench_prefill.py", ["--hf-overrides", "{"], "--hf-overrides is not valid JSON"),
        ("bench_prefill.py", ["--prompt-file", "/nowhere/at/all"], "No such file"),
        ("bench_prefill.py", ["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all"),
        ("bench_prefill.py", ["--model", "/nowhere"], "no such model folder: /nowhere"),
        ("bench_prefill.py", ["--seq-len", "200000"], "max_model_len is 163840; shorten the prompt"),
        ("bench_prefill.py", ["--cache-memory", "1MB"], "the cache is too small for this request"),
        ("measure_tpot.py", ["--output-len", "1"], "--output-len must be at least 2"),
        ("measure_tpot.py", ["--emulate-world", "0"], "emulate_world must be"),
        (
            "measure_ttft.py",
            ["--emulate-world", "4", "--emulate-rank", "4"],
            "one of the ranks 0 … 3 of emulate_world 4",
        ),
        ("measure_ttft.py", ["--emulate-rank", "1"], "--emulate-rank needs --emulate-world"),
        ("measure_ttft.py", ["--emulate-world", "25"], "n_routed_experts 24 cannot be divided over 25 ranks"),
        ("measure_ttft.py", ["--emulate-world", "8", "--cp-size", "3"], "cp_size 3 does not divide the world size 8"),
        ("measure_ttft.py", ["--expert-loads", __file__], "must hold a JSON object"),
        (
            "bench_prefill.py",
            ["--emulate-world", "2", "--dump-logits", "x.npy"],
            "logits of an emulated rank mean nothing",
        ),
        ("measure_tpot.py", ["--batch-size", "65", "--input-len", "10"], "the batch size 65 exceeds max_num_seqs 64"),
        (
            "measure_tpot.py",
            ["--input-len", "512", "--max-model-len", "514"],
            "512 tokens and up to 64 new ones exceed",
        ),
        ("measure_ttft.py", ["--json", "/"], "cannot write /: it is a folder"),
        ("bench_prefill.py", ["--plot", "x.pdf"], "give a name that ends in .png"),
        ("bench_page_tiers.py", ["--pages", "0"], "--pages, --page-size and --repeat must be at least 1"),
        ("compare_overlaps.py", ["--repeat", "0"], "--repeat and --batch-size at least 1"),
        ("compare_overlaps.py", ["--batch-size", "65", "--input-len", "10"], "the batch size 65 exceeds"),
        ("studies/compare_transformers.py", ["--threads", "0"], "must be at least 1"),
        ("evaluate.py", ["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all"),
        ("demo.py", ["--tokens", "0"], "--tokens must be at least 1"),
    ],
)
def test_bad_options_end_with_one_line(run: Run, script: str, options: list[str], message: str) -> None:
    done = run(script, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
