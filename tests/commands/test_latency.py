"""Measured times as reports have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dsa_engine.commands.bench.result import Result
from dsa_engine.measure.report import percentiles


def test_times_and_rates() -> None:
    times: dict[str, Any] = {"ttft": [0.2, 0.1, 0.3], "prefill": [0.2], "tpot": [0.05]}
    result = Result(input_len=50, batch_size=2, ranks=4, peak_memory_bytes=[1], stages={}, **times).to_json()
    assert result["median_ttft_ms"] == pytest.approx(200) and result["p99_ttft_ms"] == pytest.approx(298)
    assert result["ttft_samples_ms"] == [200, 100, 300] and "median_itl_ms" not in result
    assert result["input_throughput"] == pytest.approx(500) and result["output_throughput"] == pytest.approx(40)
    assert result["input_throughput_per_device"] == pytest.approx(125)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 100])
def test_percentiles(count: int) -> None:
    seconds = [((37 * i) % 101) / 1e3 for i in range(count)]
    row, ms = percentiles("x", seconds), np.array(seconds) * 1e3
    assert (row["p90_x_ms"], row["p99_x_ms"]) == pytest.approx(np.percentile(ms, [90, 99]))
    expected = (ms.mean(), np.median(ms), ms.min(), ms.max())
    assert tuple(row[f"{name}_x_ms"] for name in ("mean", "median", "min", "max")) == pytest.approx(expected)
