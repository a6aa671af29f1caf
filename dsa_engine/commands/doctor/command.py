"""``dsa-engine doctor``: whether this machine runs the engine and computes right; alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from dsa_engine.commands.doctor.finding import Finding
from dsa_engine.measure.report import environment, write_json
from dsa_engine.system.output_files import check_outputs

_MARKS = {True: "✓", False: "✗", None: "–"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="PATH", help="write the findings here too; '-': to standard output")
    parser.add_argument(
        "--model", metavar="DIR", help="under torchrun: also compare the files of this model on all machines"
    )


def run_doctor(args: argparse.Namespace) -> None:
    """Prints a line per check as it ends; exit status 1 if one failed."""
    import torch

    from dsa_engine.commands.doctor.checks import doctor_mesh, findings
    from dsa_engine.commands.doctor.machines import machine_checks

    check_outputs(args.json)
    mesh = doctor_mesh(args.device)
    about = {"environment": environment(mesh.device, torch.float32, mesh.world_size)}
    results: list[Finding] = []
    with _warnings_only():
        for finding in findings(mesh, machine_checks(args.model) if mesh.world_size > 1 else None):
            results.append(finding)
            if mesh.is_leader:
                print(f"{_MARKS[finding.ok]} {finding.check:<9} {finding.seen}", flush=True)
                if finding.advice:
                    print(f"  {'':<9} what to do: {finding.advice}", flush=True)
                if args.json and args.json != "-":  # the results so far, in case a check never ends
                    _write(args.json, about, results, complete=False)
    if args.json and mesh.is_leader:
        _write(args.json, about, results, complete=True)
    if any(finding.ok is False for finding in results):
        sys.exit(1)


def _write(path: str, about: dict[str, Any], results: list[Finding], complete: bool) -> None:
    write_json(path, {**about, "complete": complete, "findings": [asdict(finding) for finding in results]})


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Hides the start messages of the engines under test, unless a log level is set."""
    logger = logging.getLogger("dsa_engine")
    before = logger.level
    if not os.environ.get("DSA_ENGINE_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
