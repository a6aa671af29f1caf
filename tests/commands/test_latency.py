"""Percentiles, and the separation of measured and modelled times."""

from __future__ import annotations

import numpy as np
import pytest

from dsa_engine.measure.emulation.overlap_model import Communication
from dsa_engine.measure.report import percentiles
from dsa_engine.measure.reported_latency import Latency


def test_results_keep_measured_and_modelled_apart() -> None:
    measured = Latency("ttft", [0.2, 0.1, 0.3], tokens=100, ranks=4)
    result = measured.to_json("input_throughput")
    assert result["median_ttft_ms"] == pytest.approx(200) and result["p99_ttft_ms"] == pytest.approx(298)
    assert result["input_throughput"] == pytest.approx(500)
    assert result["input_throughput_per_device"] == pytest.approx(125)
    modelled = Communication({"MoE dispatch": 0.2, "communication": 0.1}, {"MoE dispatch": 0.2, "communication": 0.0})
    result = Latency("ttft", [0.2, 0.1, 0.3], 100, 4, modelled, stand_ins=0.05).to_json("input_throughput")
    assert "median_ttft_ms" not in result, "the name is that of a measured time"
    assert result["median_computed_ttft_ms"] == pytest.approx(200)
    assert {k: v for k, v in result["ttft_ms"].items() if k != "modelled_communication_by_stage"} == pytest.approx(
        {
            "computed": 200,
            "modelled_communication": 300,
            "not_overlapped": 500,
            "overlapped": 400,
            "stand_ins_taken_off": 50,
        }
    )
    assert result["input_throughput_per_device_overlapped"] == pytest.approx(100 / 0.4 / 4)


@pytest.mark.parametrize("count", [1, 2, 3, 6, 100])
def test_percentiles(count: int) -> None:
    seconds = [((37 * i) % 101) / 1e3 for i in range(count)]
    row, ms = percentiles("x", seconds), np.array(seconds) * 1e3
    assert (row["p90_x_ms"], row["p99_x_ms"]) == pytest.approx(np.percentile(ms, [90, 99]))
    expected = (ms.mean(), np.median(ms), ms.min(), ms.max())
    assert tuple(row[f"{name}_x_ms"] for name in ("mean", "median", "min", "max")) == pytest.approx(expected)
