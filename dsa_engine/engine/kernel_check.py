"""Kernels that check themselves: before an engine serves, each is compared with its reference on this device.

What was found is kept in the cache folder, for the device, the driver, the versions, the kernels' sources and the
model's sizes: the comparison, a few seconds, runs once. A kernel that leaves the device in an error takes the process
with it; its name is in the file by then, and the next engine runs its reference. A process that ends without an error
of the device may have been killed, by torchrun for another rank's sake, say: the kernel that it was at is suspected,
and replaced when that happens a second time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from dsa_engine.demo import cache_folder
from dsa_engine.engine.trial_steps import try_steps
from dsa_engine.errors import CheckpointError
from dsa_engine.kernels import cpu, launch, operation
from dsa_engine.kernels.cache_format import CacheFormat
from dsa_engine.kernels.launch import INTERPRETED
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.output_files import write_text
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
    kept = _kept_file(config, stored, mesh.device, options)
    wrong, suspects, finished = _read(kept)
    if max(mesh.exchange(int(not finished))):  # in step, as layers have collectives
        wrong = _compare(model, config, mesh, stored, kept, wrong, suspects)
    operation.replace(wrong)
    for name, reason in operation.replaced().items():
        logger.warning(
            "rank %s: the kernel of %s is NOT used on this device, its PyTorch reference runs instead, slower: %s; "
            "kernels='triton' would use it all the same",
            mesh.rank,
            name,
            reason,
        )
    return bool(max(mesh.exchange(len(operation.replaced()))))


def _has_kernels(model: Model, mesh: Mesh) -> bool:
    """Whether some rank would run kernels; on a CPU these are compiled for it."""
    if mesh.device.type == "cuda" or INTERPRETED:
        return True
    return bool(max(mesh.exchange(int(cpu.serves(torch.empty(0, dtype=model.runtime.dtype))))))


def trial_tokens(config: ModelConfig) -> int:
    """Tokens of a prefill in which rows select, and rows attend in each of the other forms."""
    return min(config.index_topk + 64, config.max_position_embeddings - 1)


def _compare(
    model: Model,
    config: ModelConfig,
    mesh: Mesh,
    stored: CacheFormat,
    kept: Path | None,
    known: dict[str, str],
    suspects: dict[str, int],
) -> dict[str, str]:
    operation.replace(known)  # those that have taken a process with them are not run again
    running = ""

    def before(name: str) -> None:
        nonlocal running
        running = name
        _write(kept, known | found.wrong, suspects | {name: suspects.get(name, 0) + 1})

    found = operation.Comparison(before)
    logger.info("comparing the kernels with their references, once for this device and model")
    try:
        with operation.compared(found):
            for _ in try_steps(model, config, mesh, stored, trial_tokens(config)):
                if mesh.device.type == "cuda":
                    torch.cuda.synchronize(mesh.device)
    except BaseException as error:
        guilty = {running: f"it left the device in an error ({_first_line(error)})"} if _of_device(error) else {}
        _write(kept, known | found.wrong | guilty, suspects)
        raise
    wrong = known | found.wrong
    if not _write(kept, wrong, {}, finished=True):
        logger.warning("what the comparison found cannot be kept in the cache folder: it runs at every start")
    worst = max(found.errors.items(), key=lambda pair: pair[1], default=("none", 0.0))
    logger.info("%s kernels compared, the largest error is %.2g (%s)", len(found.errors), worst[1], worst[0])
    return wrong


def _of_device(error: BaseException) -> bool:
    """Whether a kernel left the device unusable; other errors, and interrupts, are not a kernel's doing."""
    return isinstance(error, RuntimeError) and _first_line(error).startswith(("CUDA error", "Triton Error [CUDA]"))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


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
    for source in sorted(Path(operation.__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    try:
        folder = cache_folder() / "kernel_checks"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, CheckpointError):
        return None
    return folder / f"{digest.hexdigest()}.json"


def _read(kept: Path | None) -> tuple[dict[str, str], dict[str, int], bool]:
    """What was found so far: the operations that run their reference, and why; at which ones processes have ended
    without a word, and how often; and whether all were compared."""
    try:
        content = json.loads(kept.read_text(encoding="utf-8")) if kept else {}
        wrong = {str(name): str(reason) for name, reason in content["wrong"].items()}
        suspects = {str(name): int(times) for name, times in content["suspects"].items()}
        twice = {name: "it ended the process that compared it, twice" for name, n in suspects.items() if n > 1}
        return twice | wrong, suspects, bool(content["finished"])
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}, {}, False


def _write(kept: Path | None, wrong: dict[str, str], suspects: dict[str, int], *, finished: bool = False) -> bool:
    """Whether there is a file of it now."""
    try:
        if kept is not None:
            content = {"finished": finished, "wrong": wrong, "suspects": suspects}
            write_text(kept, json.dumps(content, indent=2) + "\n")
        return kept is not None
    except OSError:
        return False
