"""The tables of docs/STUDIES.md; that all ways give the paper's output is in ``test_context_parallel.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

import study
from random_layer import SIZES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "STUDIES.md"


def test_the_page_has_what_is_counted() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert [table for table in study.counted(price=2.0) if table not in page] == []


def test_what_is_measured_is_a_table_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = SIZES["small"]._replace(heads=2, topk=16)
    monkeypatch.setattr(study, "SIZES", {"small": tiny, "v3.2": tiny})
    monkeypatch.setattr(study, "LENGTHS", (1024,))
    (table,) = study.measured()
    first = [line.split("  ")[0] for line in table.splitlines()]
    assert first[2:] == [*study.WAYS] and all(f"\n{way}  " in PAGE.read_text(encoding="utf-8") for way in study.WAYS)
