"""Check of kernels: before an engine serves, each kernel is compared with its reference on this device, and so are
kernels of other libraries that are installed (`kernels/libraries/`), of which the fastest right ones are used.

The comparison takes a few seconds and runs once: its results are stored in the cache folder, by device, driver,
versions, sources of the kernels and sizes of the model. A kernel that leaves the device in an error ends the process;
the next engine runs its reference.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton

import dsa_engine.kernels.libraries  # noqa: F401  (names the adapters)
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.requests.samples import DecodeStep, Samples
from dsa_engine.engine.steps.batch import build_batch
from dsa_engine.engine.steps.context_buckets import own_bucket
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.engine.steps.static_rows import eager_batch
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.runtime import cpu, launch, libraries, operation
from dsa_engine.kernels.runtime.launch import INTERPRETED
from dsa_engine.kernels.runtime.operation import first_line
from dsa_engine.model.forward_batch import ForwardBatch, MicroBatchPair
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.rank_weights import layers_of_each_kind
from dsa_engine.options import EngineOptions
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.system.output_files import write_text
from dsa_engine.version import __version__

logger = logging.getLogger(__name__)
_PAGE_SIZE = 64


def check_kernels(
    model: Model, stored: CacheFormat, options: EngineOptions, progress: Callable[[None, str, str], Any]
) -> bool:
    """Decides which operations of this process run kernels, and which their references; every rank calls it. Returns
    whether any rank runs a reference that waits for the device: no CUDA graphs then."""
    mesh = model.runtime.mesh
    launch.use_references(always=options.kernels == "reference")
    operation.replace({})
    libraries.use({})
    if options.kernels != "checked" or not _has_kernels(model):
        return options.kernels == "reference"
    tokens = trial_tokens(model.config)
    if mesh.device.type == "cuda":  # so many on each rank: with fewer a library is judged by its overhead
        tokens = min(tokens * mesh.cp_size, model.config.max_position_embeddings - 1)
    path = _file_of(model.config, stored, mesh.device, options, tokens)
    finished, wrong, in_use = _read(path)
    operation.replace(wrong)  # a kernel that has left the device in an error is not run again
    libraries.use(in_use)
    if max(mesh.all_gather_int(int(not finished))):  # all ranks or none, as layers have collectives
        with progress(None, "kernels", "comparing with references") as bar:
            _compare(model, stored, path, tokens, bar, options.hot_rows)
    else:
        logger.info("kernels were compared with their references before, for this device and model: %s", path)
    # Only what every rank has chosen is used: a rank may have found it wrong.
    mine, *others = mesh.host.all_gather_object(libraries.choices())
    libraries.use({calls: name for calls, name in mine.items() if all(one.get(calls) == name for one in others)})
    for calls, name in libraries.choices().items():
        logger.info("rank %s: %s runs %s", mesh.rank, name, calls)
    for name, reason in operation.replaced().items():
        if name in libraries.ADAPTERS:
            logger.warning("rank %s: %s is not used: %s", mesh.rank, name, reason)
            continue
        logger.warning(
            "rank %s: the kernel of %s is NOT used on this device, its PyTorch reference runs instead, slower: %s; "
            "kernels='triton' would use it all the same", mesh.rank, name, reason,
        )  # fmt: skip
    needed = sorted(set(operation.replaced()) - set(libraries.ADAPTERS)) if options.batch_invariant else []
    if max(mesh.all_gather_int(len(needed))):
        raise RuntimeError(
            f"batch_invariant needs every kernel, and on this device {', '.join(needed) or 'some of another rank'} "
            "differ from their references, as the log says; another version of Triton or the driver may do, or leave "
            "batch_invariant out"
        )
    if waiting := operation.waiting():
        logger.warning("decode runs without CUDA graphs, as these references wait: %s", ", ".join(sorted(waiting)))
    return bool(max(mesh.all_gather_int(len(waiting))))


def _has_kernels(model: Model) -> bool:
    """Whether any rank would run kernels; a CPU has compiled ones."""
    mesh, dtype = model.runtime.mesh, model.runtime.dtype
    own = mesh.device.type == "cuda" or INTERPRETED or cpu.serves(torch.empty(0, dtype=dtype))
    return bool(max(mesh.all_gather_int(int(own))))


def trial_tokens(config: ModelConfig) -> int:
    """Number of tokens of a prefill with rows in every form of attention: many rows, as libraries count them."""
    return min(config.index_topk + 2 * libraries.FEW_ROWS, config.max_position_embeddings - 1)


@torch.inference_mode()
def try_steps(model: Model, stored: CacheFormat, tokens: int, hot_rows: int = 0) -> Iterator[str]:
    """Runs two steps through one layer of each kind, on all ranks together; yields the name of each step after it.

    The steps are a prefill of ``tokens`` tokens on each context-parallel group, and a decode step on each rank; with
    ``hot_rows`` its requests have all pages but the last among the spilled ones.
    """
    config, mesh = model.config, model.runtime.mesh
    layers = layers_of_each_kind(config)
    pages = pages_for(tokens + 1, _PAGE_SIZE)
    with torch.random.fork_rng(devices=[]):
        ids = torch.randint(config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    sets = mesh.dcp.size if hot_rows else 0
    cache = KVCache(config, stored, pages, _PAGE_SIZE, mesh.device, mesh.dcp, pages * bool(hot_rows), sets, hot_rows)
    for pool in (*cache.latent, *cache.index_keys):
        if pool is not None:
            pool.zero_()  # the same steps each time, whatever the memory held

    def run(batch: ForwardBatch | MicroBatchPair) -> None:
        model.logits(model(batch, cache, layers)[-1:])

    def request(number: int, index: int = 0, spilled: int = 0) -> Request:
        first = spilled * mesh.dcp.size
        return Request(number, ids, SamplingParams(), pages=[*range(first, first + pages - 1), pages - 1 + index])

    of = mesh.rank, mesh.world_size, config
    groups, ranks = range(mesh.world_size // mesh.cp_size), mesh.dcp.ranks
    prefill = [Chunk(request(group), 0, tokens, mesh.cp_ranks(group)) for group in groups]
    run(build_batch(StepPlan.of(prefill, *of), config, mesh, cache, None, repeats=False))
    yield "prefill"
    for latent, host, keys in zip(cache.latent, cache.host_latent, cache.index_keys, strict=False):
        host.copy_(latent[:pages])
        if keys is not None:
            keys[pages:] = keys[:pages]
    if cache.group is None and cache.hot is None:
        decode = [Chunk(request(rank), tokens, 1, range(rank, rank + 1)) for rank in range(mesh.world_size)]
        run(build_batch(StepPlan.of(decode, *of), config, mesh, cache, None, repeats=False))
    else:  # each request ends in a page of its own
        requests = [request(rank, i, cache.spilled) for i, rank in enumerate(ranks)]
        for i, one in enumerate(requests):
            one.hot_set = i
        decode = [Chunk(one, tokens, 1, range(one.id, one.id + 1), 1) for one in requests]
        each = np.arange(mesh.world_size)
        samples = Samples.by_rank(each, each, np.ones_like(each), mesh.world_size, -1)
        step = DecodeStep(decode, samples, np.full_like(each, tokens), 0, 0)
        run(eager_batch(StepPlan.of_decode(step, *of, own_bucket(step), ranks), model, cache, None))
    yield "decode"


def _compare(model: Model, stored: CacheFormat, path: Path, tokens: int, bar: Any, hot_rows: int = 0) -> None:
    """Replaces each kernel that differs from its reference, and stores what is replaced."""
    begun = [""]  # names of kernels

    def begin(name: str) -> None:
        begun.append(name)
        bar.set_postfix_str(name, refresh=False)
        bar.update()

    comparison = operation.Comparison(begin)
    logger.info("comparing the kernels with their references, once for this device and model")
    try:
        with operation.compared(comparison):
            for _ in try_steps(model, stored, tokens, hot_rows):
                if model.runtime.device.type == "cuda":
                    torch.cuda.synchronize(model.runtime.device)
    except RuntimeError as error:
        line = first_line(error)
        if line.startswith(("CUDA error", "Triton Error [CUDA]")):  # not, for instance, if memory was short
            _write(path, False, operation.replaced() | {begun[-1]: f"it left the device in an error ({line})"})
        raise
    _write(path, True, operation.replaced(), libraries.choices())
    for name, reason in comparison.rejected.items():
        logger.info("%s is not used: %s", name, reason)
    worst = max(comparison.errors.items(), key=lambda pair: pair[1], default=("none", 0.0))
    logger.info("%s kernels compared, the largest error is %.2g (%s)", len(comparison.errors), worst[1], worst[0])


def _read(path: Path) -> tuple[bool, dict[str, str], dict[str, str]]:
    """Whether all kernels have been compared, why some are replaced, and which libraries run what; nothing where there
    is no whole file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return bool(content.get("finished")), dict(content.get("wrong", {})), dict(content.get("libraries", {}))
    except (OSError, ValueError):
        return False, {}, {}


def _write(path: Path, finished: bool, wrong: dict[str, str], in_use: dict[str, str] | None = None) -> None:
    """Writes the file by renaming; what another rank has found wrong stays."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"finished": finished, "wrong": _read(path)[1] | wrong, "libraries": in_use or {}}
        write_text(path, json.dumps(content, indent=2) + "\n")
    except OSError as error:
        logger.warning("the kernels are compared at every start, as the results cannot be stored: %s", error)


def _file_of(
    config: ModelConfig, stored: CacheFormat, device: torch.device, options: EngineOptions, tokens: int
) -> Path:
    about: list[Any] = [__version__, torch.__version__, triton.__version__, INTERPRETED, repr(stored), tokens]
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", int)()
        about += [properties.name, torch.cuda.get_device_capability(device), torch.version.cuda, driver]
        about += libraries.installations()
    about += [
        options.dtype,
        options.quantization,
        options.hot_rows,
        sorted(asdict(config).items(), key=lambda item: item[0]),
    ]
    digest = hashlib.blake2b(repr(about).encode(), digest_size=12)
    if device.type == "cpu" and not INTERPRETED and cpu.library() is not None:  # perhaps only another rank has one
        digest.update(cpu.digest().encode())
    for source in sorted(Path(operation.__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    try:
        folder = cpu.user_cache() / "kernel_checks"
    except OSError:
        folder = Path(os.devnull)  # nothing can be stored
    return folder / f"{digest.hexdigest()}.json"
