"""Results for people and for machines: tables on stdout, JSON with what is needed to compare runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsa_engine.output_files import write_text
from dsa_engine.version import __version__


def environment(device: torch.device, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Where a result was measured: device, dtype, ranks, threads and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    packages = {"dsa_engine": __version__, "python": platform.python_version()}
    for package in ("torch", "triton", "transformers"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "device": name,
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": world_size,
        "threads_per_rank": torch.get_num_threads(),
        "versions": packages,
    }


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table: the first column to the left, the others to the right; floats with a sensible number of digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *rest = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join((first, *rest)).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def format_percentages(title: str, columns: Mapping[str, Mapping[str, float]]) -> str:
    """A table of seconds by name in percent of their sum: a row for each name that has any, a column for each of
    ``columns``."""
    names = list(dict.fromkeys(name for seconds in columns.values() for name in seconds))
    rows = []
    for name in names:
        fractions = [seconds.get(name, 0.0) / (sum(seconds.values()) or 1.0) for seconds in columns.values()]
        if any(fractions):
            rows.append((name, *(f"{fraction:.1%}" for fraction in fractions)))
    return format_table((title, *columns), rows)


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Writes the result whole or not at all; "-" is standard output."""
    write_text(path, json.dumps(result, indent=2) + "\n")


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "cpu"
