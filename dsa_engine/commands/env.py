"""``dsa-engine env``: versions, devices and paths, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from dsa_engine.measure.report import write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import available_bytes, format_bytes
from dsa_engine.version import __version__

_PACKAGES = ("triton", "transformers", "tokenizers", "safetensors", "numpy", "flash-attn", "deepspeed", "matplotlib")
# Prefixes of variables that change what the program does, none of which can be secret.
_VARIABLES: tuple[str, ...] = ("CUDA_", "DSA_ENGINE_", "GLOO_", "HF_HOME", "HF_HUB_CACHE", "LOCAL_")
_VARIABLES += ("NCCL_", "OMP_NUM_THREADS", "RANK", "TRITON_", "WORLD_SIZE", "XDG_CACHE_HOME")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="PATH", help="write it here too; '-': to standard output")


def run_env(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    report = _environment()
    if args.json:
        write_json(args.json, report)
    for title, entries in report.items():
        print(f"{title}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")


def _environment() -> dict[str, dict[str, Any]]:
    """Texts and numbers by name, under the titles versions, machine, devices, paths and variables."""
    import torch

    from dsa_engine.kernels.runtime import cpu

    installed = {one.metadata["Name"]: one.version for one in distributions()}
    versions = {"dsa_engine": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA of torch": torch.version.cuda or "none"}
    versions |= {name: installed.get(name, "not installed") for name in _PACKAGES}
    machine = {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory available": format_bytes(available_bytes()),
        "torch threads": torch.get_num_threads(),
        "C++ compiler": shutil.which(os.environ.get("CXX", "g++")) or "none; install g++, or set CXX",
    }
    devices: dict[str, Any] = {}
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        memory = f"{format_bytes(free)} of {format_bytes(total)} free"
        devices[f"cuda:{i}"] = f"{about.name}, sm_{about.major}{about.minor}, {memory}"
    paths = {"python": sys.executable, "dsa_engine": Path(__file__).parents[1], "cache": cpu.user_cache()}
    return {
        "versions": versions,
        "machine": machine,
        "devices": devices or {"cuda": "none; models run on the CPU"},
        "paths": {name: str(path) for name, path in paths.items()} | {"working folder": os.getcwd()},
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }
