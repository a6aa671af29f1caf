"""``dsa-engine doctor``: whether this node runs the engine and computes right; alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from dsa_engine.measure.report import environment, write_so_far
from dsa_engine.system.output_files import check_outputs

if TYPE_CHECKING:
    from dsa_engine.commands.doctor.checks import Finding

_MARKS = {True: "✓", False: "✗", None: "–"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="PATH", help="write the findings here too; '-': to standard output")
    parser.add_argument("--model", metavar="DIR", help="under torchrun: compare this model's files on all nodes too")


def show(finding: Finding, width: int = 9) -> None:
    """Prints a line, and what to do if it says so."""
    print(f"{_MARKS[finding.ok]} {finding.check:<{width}} {finding.seen}", flush=True)
    if finding.advice:
        print(f"  {'':<{width}} what to do: {finding.advice}", flush=True)


def run_doctor(args: argparse.Namespace) -> None:
    """Prints a line per check as it ends; exit status 1 if one failed."""
    import torch

    from dsa_engine.commands.doctor.checks import doctor_mesh, findings

    check_outputs(args.json)
    logger = logging.getLogger("dsa_engine")
    level = logger.level
    if not os.environ.get("DSA_ENGINE_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)  # hides the start messages of the engines under test
    mesh = doctor_mesh(args.device)
    path = args.json if mesh.is_leader else None
    about = {"environment": environment(mesh.device, torch.float32, mesh.world_size)}
    results = []
    try:
        for finding in findings(mesh, args.model):
            results.append(asdict(finding))
            write_so_far(path, about, results, complete=False)  # in case a check never ends
            if mesh.is_leader:
                show(finding)
    finally:
        logger.setLevel(level)
    write_so_far(path, about, results, complete=True)
    if any(result["ok"] is False for result in results):
        sys.exit(1)
