"""Sizes such as 4GiB, read and written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsa_engine.system.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    "value, expected",
    [
        (1, 1),
        (123456, 123456),
        ("77", 77),
        ("77B", 77),
        ("4GiB", 4 << 30),
        (" 1.5 KiB ", 1536),
        ("2kib", 2048),
        ("512MB", 512_000_000),
        ("3TB", 3 * 10**12),
        ("0.5gb", 500_000_000),
    ],
)
def test_parse(value: int | str, expected: int) -> None:
    assert parse_bytes(value, "x") == expected


@pytest.mark.parametrize("value", ["4 apples", "", "GiB", "-1GiB", "1e3", "2X", "1,5GiB", "1 GiB free"])
def test_what_is_no_size(value: str) -> None:
    with pytest.raises(ValueError, match=f"^cache_memory .* '4GiB' .* not '{value}'$"):
        parse_bytes(value, "cache_memory")


@pytest.mark.parametrize("value", [0, -5, True, None, "0", "0.0001KiB", 1.5, 4e9, 2**63, "9" * 400, "9" * 18 + "TB"])
def test_what_is_not_positive(value: object) -> None:
    with pytest.raises(ValueError, match="^workspace .* positive .* not "):
        parse_bytes(value, "workspace")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "count, text",
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1.5 * 2**30, "1.50 GiB"), (5 * 2**40, "5.00 TiB")],
)
def test_format(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1, 2**50))
def test_what_is_shown_can_be_read(count: int) -> None:
    assert parse_bytes(format_bytes(count), "x") == pytest.approx(count, rel=0.01)
