"""Options and files that a script refuses, each with one line and exit status 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize(
    "script, options, message",
    [
        ("bench_prefill.py", ["--input-len", "0"], "positive numbers"),
        ("bench_prefill.py", ["--repeat", "0"], "--repeat"),
        ("bench_prefill.py", ["--prompt-file", "/nowhere/at/all"], "No such file"),
        ("bench_prefill.py", ["--json", "/nowhere/at/all.json"], "cannot write /nowhere/at/all"),
        ("bench_prefill.py", ["--input-len", "200000"], "length is 163840 tokens"),
        ("bench_prefill.py", ["--cache-memory", "1MB"], "the cache is too small"),
        ("bench_prefill.py", ["--emulate-world", "2", "--dump-logits", "x.npy"], "logits of an emulated rank"),
        ("bench_prefill.py", ["--plot", "x.pdf"], ".png"),
        ("measure_tpot.py", ["--output-len", "1"], "--output-len must be at least 2"),
        ("measure_tpot.py", ["--emulate-world", "0"], "emulate_world must be"),
        ("measure_tpot.py", ["--batch-size", "65", "--input-len", "10"], "max_num_seqs 64"),
        ("measure_ttft.py", ["--emulate-world", "4", "--emulate-rank", "4"], "0 … 3 of emulate_world 4"),
        ("measure_ttft.py", ["--emulate-rank", "1"], "--emulate-rank needs --emulate-world"),
        ("measure_ttft.py", ["--emulate-world", "25"], "n_routed_experts 24"),
        ("measure_host.py", ["--requests", "0"], "--requests"),
        ("studies/compare_transformers.py", ["--threads", "0"], "at least 1"),
        ("demo.py", ["--tokens", "0"], "--tokens"),
    ],
)
def test_bad_options_end_with_one_line(run: Run, script: str, options: list[str], message: str) -> None:
    done = run(script, *options)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
