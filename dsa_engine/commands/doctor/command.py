"""``dsa-engine doctor``: whether this node runs the engine and computes right; alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dsa_engine.measure.report import environment, write_so_far
from dsa_engine.system.output_files import check_outputs

if TYPE_CHECKING:
    from dsa_engine.commands.doctor.checks import Finding

_MARKS = {True: "✓", False: "✗", None: "–"}
_MARKS_IN_ASCII = {True: "ok", False: "NO", None: "--"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="PATH", help="write the findings here too; '-': to standard output")
    parser.add_argument("--model", metavar="DIR", help="under torchrun: compare this model's files on all nodes too")


def show_all(findings: Iterable[Finding], path: str | None, about: dict[str, Any], leads: bool, width: int) -> None:
    """Prints a line per finding as it comes, and what to do, on the rank that leads; exit status 1 if one is wrong."""
    path, results = path if leads else None, []
    unknown = b"?" in "".join(_MARKS.values()).encode(sys.stdout.encoding or "utf-8", "replace")
    marks = _MARKS_IN_ASCII if unknown else _MARKS
    for finding in findings:
        results.append(asdict(finding))
        write_so_far(path, about, results, complete=False)  # in case a check never ends
        if leads:
            print(f"{marks[finding.ok]} {finding.check:<{width}} {finding.seen}", flush=True)
        if leads and finding.advice:
            print(f"  {'':<{width}} what to do: {finding.advice}", flush=True)
    write_so_far(path, about, results, complete=True)
    if any(result["ok"] is False for result in results):
        sys.exit(1)


def run_doctor(args: argparse.Namespace) -> None:
    import torch

    from dsa_engine.commands.doctor.checks import doctor_mesh, findings

    check_outputs(args.json)
    logger = logging.getLogger("dsa_engine")
    level = logger.level
    if not os.environ.get("DSA_ENGINE_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)  # hides the start messages of the engines under test
    mesh = doctor_mesh(args.device)
    about = {"environment": environment(mesh.device, torch.float32, mesh.world_size)}
    try:
        show_all(findings(mesh, args.model), args.json, about, mesh.is_leader, width=9)
    finally:
        logger.setLevel(level)
