"""Kernels that check themselves: before an engine serves, each is compared with its reference on this device.

What was found is kept in the cache folder, for the device, the driver, the versions, the kernels' sources and the
model's sizes: the comparison, a few seconds, runs once. A kernel that leaves the device in an error takes the process
with it; its name is in the file by then, and the next engine runs its reference. A process that ends without a word may
have been killed for another reason: the kernel that it was at is suspected, and replaced when that happens a second
time (`kernel_findings.py`).
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.startup.dummy_steps import try_steps
from dsa_engine.engine.startup.kernel_findings import KernelFindings, taken_along
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime import cpu, launch, operation
from dsa_engine.kernels.runtime.error_line import first_line
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.version import __version__

logger = logging.getLogger(__name__)


def check_kernels(model: Model, config: ModelConfig, mesh: Mesh, stored: CacheFormat, options: EngineOptions) -> bool:
    """Decides for this process what its operations run, as ``options.kernels`` says; every rank calls it.

    Returns:
        whether some operation of some rank runs its reference, which may wait for the device: no CUDA graphs then.
    """
    launch.use_references(always=options.kernels == "reference")
    operation.replace({})
    if options.kernels != "checked" or not _has_kernels(model, mesh):
        return options.kernels == "reference"
    findings = KernelFindings(_kept_file(config, stored, mesh.device, options))
    wrong = findings.wrong
    if max(mesh.all_gather_int(int(not findings.finished))):  # in step, as layers have collectives
        wrong = _compare(model, config, mesh, stored, findings)
    operation.replace(wrong)
    for name, reason in operation.replaced().items():
        logger.warning(
            "rank %s: the kernel of %s is NOT used on this device, its PyTorch reference runs instead, slower: %s; "
            "kernels='triton' would use it all the same",
            mesh.rank,
            name,
            reason,
        )
    return bool(max(mesh.all_gather_int(len(operation.replaced()))))


def _has_kernels(model: Model, mesh: Mesh) -> bool:
    """Whether some rank would run kernels; on a CPU these are compiled for it."""
    if mesh.device.type == "cuda" or INTERPRETED:
        return True
    return bool(max(mesh.all_gather_int(int(cpu.serves(torch.empty(0, dtype=model.runtime.dtype))))))


def trial_tokens(config: ModelConfig) -> int:
    """Tokens of a prefill in which rows select, and rows attend in each of the other forms."""
    return min(config.index_topk + 64, config.max_position_embeddings - 1)


def _compare(
    model: Model, config: ModelConfig, mesh: Mesh, stored: CacheFormat, findings: KernelFindings
) -> dict[str, str]:
    operation.replace(findings.wrong)  # those that have taken a process with them are not run again
    running = ""

    def before(name: str) -> None:
        nonlocal running
        running = name
        findings.mark(name)

    found = operation.Comparison(before)
    logger.info("comparing the kernels with their references, once for this device and model")
    try:
        with taken_along(findings), operation.compared(found):
            for _ in try_steps(model, config, mesh, stored, trial_tokens(config)):
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize(mesh.device)
    except BaseException as error:
        guilty = {running: f"it left the device in an error ({first_line(error)})"} if _of_device(error) else {}
        findings.leave(found.wrong | guilty)
        raise
    if not findings.finish(found.wrong):
        logger.warning("what the comparison found cannot be kept in the cache folder: it runs at every start")
    worst = max(found.errors.items(), key=lambda pair: pair[1], default=("none", 0.0))
    logger.info("%s kernels compared, the largest error is %.2g (%s)", len(found.errors), worst[1], worst[0])
    return findings.wrong | found.wrong


def _of_device(error: BaseException) -> bool:
    """Whether a kernel left the device unusable; other errors, and interrupts, are not a kernel's doing."""
    return isinstance(error, RuntimeError) and first_line(error).startswith(("CUDA error", "Triton Error [CUDA]"))


def _kept_file(config: ModelConfig, stored: CacheFormat, device: torch.device, options: EngineOptions) -> Path | None:
    """Where results for this device, these versions and sizes are kept; None where there is no folder for it."""
    about: list[Any] = [__version__, torch.__version__, triton.__version__, INTERPRETED, repr(stored)]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
        about += [properties.name, torch.cuda.get_device_capability(device), torch.version.cuda, driver]
    about += [options.dtype, options.quantization, sorted(asdict(config).items(), key=lambda item: item[0])]
    digest = hashlib.blake2b(repr(about).encode(), digest_size=12)
    if device.type == "cpu" and not INTERPRETED and cpu.library() is not None:  # only another rank may have one
        digest.update(cpu.digest().encode())
    for source in sorted(Path(operation.__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    try:
        folder = cpu.user_cache() / "kernel_checks"
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder / f"{digest.hexdigest()}.json"
