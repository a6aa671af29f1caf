"""The time to go of a prefill."""

from __future__ import annotations

from unittest.mock import patch

from dsa_engine.system.progress import progress_bar


def test_the_time_to_go_follows_the_growth_of_attention() -> None:
    """Chunks of 4,096 of 57,344 tokens that take a · n + b · n² seconds, half of it the square: the first line says
    only that it is longer, each later one what remains."""
    now, total, shown = 1000.0, 14 * 4096, []
    taken = [1e-3 * n + 1e-3 * n * n / total for n in range(0, total + 1, 4096)]
    bar = progress_bar(total, "tokens", "prefill")
    with patch.object(bar, "_time", lambda: now):
        bar.start_t = now
        assert "remaining" not in bar.format_dict, "not known"
        for seconds in taken[1:]:
            now = 1000.0 + seconds
            bar.update(4096)
            shown.append(bar.format_dict["remaining"])
    to_go = [bar.format_interval(taken[-1] - seconds + 1e-6) for seconds in taken[1:]]
    assert shown[0].startswith("over 00:5") and shown[1:] == to_go[1:] and to_go[1] == "01:45"
    bar.close()
