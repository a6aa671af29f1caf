"""``dsa-engine doctor``: whether this machine runs the engine, and runs it right; alone or under torchrun."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from dsa_engine.measure.doctor import Finding, doctor_mesh, findings
from dsa_engine.measure.report import environment, write_json
from dsa_engine.system.output_files import check_outputs

_MARKS = {True: "✓", False: "✗", None: "–"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--json", metavar="PATH", help="write the findings here too; '-': to standard output")


def run_doctor(args: argparse.Namespace) -> None:
    """Prints a line for every check, as it comes; exit status 1 where one failed."""
    check_outputs(args.json)
    mesh = doctor_mesh(args.device)
    about = {"environment": environment(mesh.device, torch.float32, mesh.world_size)}
    found: list[Finding] = []
    with _warnings_only():
        for finding in findings(mesh):
            found.append(finding)
            if mesh.is_leader:
                print(f"{_MARKS[finding.ok]} {finding.check:<9} {finding.seen}", flush=True)
                if finding.advice:
                    print(f"  {'':<9} what to do: {finding.advice}", flush=True)
                if args.json and args.json != "-":  # what there is so far, should a check never end
                    _write(args.json, about, found, complete=False)
    if args.json and mesh.is_leader:
        _write(args.json, about, found, complete=True)
    if any(finding.ok is False for finding in found):
        sys.exit(1)


def _write(path: str, about: dict[str, Any], found: list[Finding], complete: bool) -> None:
    write_json(path, {**about, "complete": complete, "findings": [asdict(finding) for finding in found]})


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Within, engines that are made to be looked at say nothing of their start, unless a log level was asked for."""
    logger = logging.getLogger("dsa_engine")
    before = logger.level
    if not os.environ.get("DSA_ENGINE_LOG_LEVEL"):
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)
