"""``dsa-engine env``: versions, devices and paths, for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from dsa_engine.engine.startup.memory import available_bytes
from dsa_engine.kernels.runtime import cpu
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.measure.report import write_json
from dsa_engine.system.output_files import check_outputs
from dsa_engine.system.sizes import format_bytes
from dsa_engine.version import __version__

_PACKAGES = ("triton", "transformers", "tokenizers", "safetensors", "numpy", "flash-attn", "deepspeed", "matplotlib")
# Variables that change what the program does, and none that may be secret.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "DSA_ENGINE_",
    "GLOO_",
    "HF_HOME",
    "HF_HUB_CACHE",
    "LOCAL_RANK",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "NCCL_",
    "OMP_NUM_THREADS",
    "RANK",
    "TRITON_",
    "WORLD_SIZE",
    "XDG_CACHE_HOME",
)


def run_env(args: argparse.Namespace) -> None:
    check_outputs(args.json)
    report = environment_report()
    if args.json:
        write_json(args.json, report)
    for title, entries in report.items():
        print(f"{title}:")
        for name, value in entries.items():
            print(f"  {name}: {value}")


def environment_report() -> dict[str, dict[str, Any]]:
    """Texts and numbers by name, under the titles versions, machine, devices, paths and variables."""
    versions = {"dsa_engine": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {"CUDA of torch": torch.version.cuda or "none"}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    machine = {
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory available": format_bytes(available_bytes()),
        "torch threads": torch.get_num_threads(),
        "triton": "in the interpreter" if INTERPRETED else "compiles for CUDA devices",
        "C++ compiler": cpu.compiler() or "none; install g++, or set CXX",
        "C++ kernels": _native(),
    }
    return {
        "versions": versions,
        "machine": machine,
        "devices": _devices(),
        "paths": _paths(),
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }


def _native() -> str:
    """Whether CPU tensors take the C++ kernels; nothing is compiled."""
    if os.environ.get("DSA_ENGINE_NATIVE") == "0":
        return "off (DSA_ENGINE_NATIVE=0); the PyTorch references run"
    try:
        library = next((cpu.user_cache() / "native").glob(f"kernels-{cpu.digest()}*.so"), None)
    except OSError as error:
        return f"none: {error}"
    if library is not None:
        return str(library)
    return "compiled on first use" if cpu.compiler() else "none; the PyTorch references run"


def _devices() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"cuda": "none; models run on the CPU"}
    devices: dict[str, Any] = {}
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        memory = f"{format_bytes(free)} of {format_bytes(total)} free"
        devices[f"cuda:{i}"] = f"{about.name}, sm_{about.major}{about.minor}, {memory}"
    if torch.distributed.is_nccl_available():
        devices["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return devices


def _paths() -> dict[str, Any]:
    try:
        cache = cpu.user_cache()
        above = next(path for path in (cache, *cache.absolute().parents) if path.exists())
        shown = f"{cache} ({format_bytes(shutil.disk_usage(above).free)} free)"
    except OSError as error:
        shown = f"none: {error}"
    return {
        "python": sys.executable,
        "dsa_engine": str(Path(__file__).resolve().parents[1]),
        "cache": shown,
        "working folder": os.getcwd(),
    }
