"""Results for people and for nodes: tables on stdout, JSON with what is needed to compare runs."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsa_engine.system.output_files import write_text
from dsa_engine.version import __version__

if TYPE_CHECKING:
    import torch

    from dsa_engine.engine.engine import Engine

logger = logging.getLogger(__name__)


def versions(*packages: str) -> dict[str, Any]:
    """What a measurement was made with: date, commit of the checkout, and the versions of these packages."""
    numbers = {"dsa_engine": __version__, "python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            numbers[package] = version(package)
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": date, "commit": _commit(), "versions": numbers}


def environment(device: torch.device, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """:func:`versions`, device, dtype, ranks and threads."""
    import torch  # a benchmark of a server does without it

    return versions("torch", "triton", "transformers") | {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "dtype": str(dtype).removeprefix("torch."),
        "world_size": world_size,
        "threads_per_rank": torch.get_num_threads(),
    }


def run_report(engine: Engine, given: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """The facts needed to compare a run with another one, or to repeat it, of ``world_size`` processes. ``given``: the
    options as they were typed; "options_in_force" has all, defaults included."""
    shape = {name: v for name, v in asdict(engine.config).items() if not isinstance(v, list | tuple | dict)}
    return {
        **environment(engine.mesh.device, engine.dtype, world_size),
        "model": {"name": Path(engine.options.model).absolute().name, **shape},
        "options": dict(given),
        "options_in_force": asdict(engine.options) | {"parallel": asdict(engine.options.parallel)},
    }


def caption(report: Mapping[str, Any], emulated: str = "") -> str:
    """Title of a plot: model, device, dtype, ranks and date of :func:`run_report`, and what is emulated."""
    model, ranks, threads = report["model"], report["world_size"], report["threads_per_rank"]
    processes = f"{threads} thread{'s' * (threads > 1)}" + (f" on each of {ranks} ranks" if ranks > 1 else "")
    parts = f"{model['name']}, {model['num_hidden_layers']} layers", report["device"], report["dtype"], processes
    return " · ".join((*parts, report["date"][:10])) + (f"\n{emulated}" if emulated else "")


def format_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain table: the first column to the left, the others to the right; floats with a sensible number of digits."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    cells.insert(1, ["-" * width for width in (first, *others)])
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in cells)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def percentiles(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, p90, p99, minimum and maximum, in milliseconds, named as ``vllm bench`` names them."""
    import numpy as np  # which --help does not need

    ms = np.asarray(seconds) * 1e3
    parts = {"mean": ms.mean(), "median": np.median(ms), "p90": np.percentile(ms, 90), "p99": np.percentile(ms, 99)}
    parts |= {"min": ms.min(), "max": ms.max()}
    return {f"{part}_{name}_ms": float(value) for part, value in parts.items()}


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Writes the result whole or not at all; "-" is standard output. Values that JSON does not know become texts."""
    write_text(path, json.dumps(result, indent=2, default=lambda value: str(value).removeprefix("torch.")) + "\n")
    if result.get("complete", True) and str(path) != "-":
        logger.info("the figures are in %s", path)


def write_so_far(path: str | None, about: Mapping[str, Any], results: Sequence[Any], *, complete: bool) -> None:
    """Writes all results so far, whole each time, so that a later failure loses none of them; standard output gets only
    the complete report."""
    if path and (complete or path != "-"):
        write_json(path, {**about, "complete": complete, "results": list(results)})


def _commit() -> str | None:
    """The commit of the running checkout, with "-dirty" if files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    if not (root / ".git").exists():
        return None
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")
