"""How many pages there are, by the options and the memory: on the device, in host memory, on their way to other ranks
and to a folder on the disk."""

from __future__ import annotations

import json
import math
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.cache.exchange import exchange_bytes
from dsa_engine.engine.cache.folder import VERSION, PageFolder
from dsa_engine.engine.cache.transfer import HostPages, PageTransfer, staging_bytes
from dsa_engine.engine.requests.limits import least_resident, pages_for
from dsa_engine.errors import CapacityError
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.rows.resolve_rows import COLUMNS
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.model.kv_cache import KVCache, cache_bytes_per_token, pool_page_bytes
from dsa_engine.model.model import Model
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.launch_environment import local_world_size
from dsa_engine.system.sizes import available_bytes, format_bytes, parse_bytes
from dsa_engine.version import __version__
from dsa_engine.weights.index import checkpoint_digest

_CPU_DEFAULT_CACHE = 4 << 30  # limit of the caches on a CPU, whose memory other programs use too
_EXCHANGED = 64 << 20  # bytes of a layer that a rank sends, or receives, in a step
_TRANSIT = 2 << 30  # maximum bytes of host memory for pages on their way to the disk, or from it if there is no other


def default_cache_memory(device: torch.device, utilization: float, for_steps: int) -> int:
    """Bytes for the caches, from the memory that is free after the weights are loaded and the largest steps have run.
    ``utilization``: fraction of a GPU's memory that may be used in total, other programs included."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory that PyTorch has reserved and not allocated counts as free: for_steps contains it, or caches get it.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return max(0, int(free - (1 - utilization) * total - for_steps))
    return min(_CPU_DEFAULT_CACHE, available_bytes() // 2 // local_world_size())


def affordable_pages(options: EngineOptions, mesh: Mesh, max_model_len: int, token_bytes: int, for_steps: int) -> int:
    """Number of pages of the cache: the minimum over the ranks of what fits, but no more than can be used.
    ``token_bytes``: bytes of one token in the caches of all layers."""
    page_size = options.page_size
    one, memory = page_size * token_bytes, _cache_memory(options, mesh, for_steps)
    pages = min(mesh.all_gather_int(min(memory // one, _useful_pages(options, mesh, max_model_len))))
    if pages == 0:
        replicas = options.parallel.redundant_experts
        raise CapacityError(
            f"the cache is too small: a page of {page_size} tokens takes {format_bytes(one)}, "
            f"{format_bytes(memory)} are there for it beside {format_bytes(for_steps)} for steps; raise cache_memory, "
            "or use a smaller page_size, a smaller max_num_batched_tokens"
            + (f", or fewer redundant_experts than {replicas}" if replicas else "")
        )
    return pages


def _cache_memory(options: EngineOptions, mesh: Mesh, for_steps: int) -> int:
    if options.cache_memory is None:
        return default_cache_memory(mesh.device, options.gpu_memory_utilization, for_steps)
    return parse_bytes(options.cache_memory, "cache_memory")


def _useful_pages(options: EngineOptions, mesh: Mesh, max_model_len: int) -> int:
    return math.ceil(options.max_num_seqs * pages_for(max_model_len, options.page_size) / mesh.dcp.size)


class HotBytes(NamedTuple):
    """Bytes on a rank, in all layers, of hot rows and of pages that spill."""

    rows: int  # of the hot rows of all sets, and their tables
    page: int  # of a resident page
    keys: int  # of a spilled page on the device: its index keys, and where its rows are
    latent: int  # of a spilled page in host memory

    @classmethod
    def of(cls, config: ModelConfig, format: CacheFormat, page_size: int, sets: int, hot_rows: int) -> HotBytes:
        layers, selecting = len(config.indexer_types), config.indexer_types.count("full")
        latent, page = page_size * format.latent.row_bytes * layers, page_size * cache_bytes_per_token(config, format)
        # As HotRows has them, with a set and a page of padding: int32 for each spilled row its hot row, for each hot
        # row its row, and when it was used.
        tables = 4 * page_size + (sets + 1) * (8 * hot_rows + 8 * COLUMNS)
        rows = cdiv(sets * hot_rows, page_size) * latent + tables * selecting
        return cls(rows, page, page - latent + 4 * page_size * selecting, latent)

    def divide(self, memory: int, host: int, useful: int) -> tuple[int, int]:
        """Numbers of resident and of spilled pages, ``useful`` ones together, in ``memory`` on the device and ``host``
        bytes of host memory: spilled ones take at most three quarters of the former, and leave a page of the latter."""
        memory = max(0, memory - self.rows)
        lacking = cdiv(max(1, useful - memory // self.page) * self.page, self.page - self.keys)
        spilled = max(0, min((host - self.page) // self.latent, memory * 3 // 4 // self.keys, lacking))
        return min(useful, (memory - spilled * self.keys) // self.page), spilled


class TierSizes(NamedTuple):
    """Sizes in pages, the same on every rank."""

    host: int  # pages in host memory that have left the device, or that the disk has brought
    to_disk: int  # further pages in host memory, on their way to the disk
    exchanged: int  # maximum number of pages that a rank sends, or receives, in a step; 0: ranks exchange none
    spilled: int = 0  # pages in host memory but for their index keys
    sets: int = 0  # of hot rows, for the requests of the ranks that hold pages together

    @classmethod
    def of(
        cls, options: EngineOptions, mesh: Mesh, config: ModelConfig, format: CacheFormat, max_model_len: int
    ) -> TierSizes:
        if not options.enable_prefix_caching:
            return cls(0, 0, 0)
        page_bytes, layers = options.page_size * cache_bytes_per_token(config, format), len(config.indexer_types)
        # With one pool a context-parallel group has each page once, and nothing is fetched.
        exchanged = 0 if mesh.cp.size == mesh.dcp.size else max(1, _EXCHANGED * layers // page_bytes)
        wanted = options.host_cache_memory
        memory = 0 if wanted is None else parse_bytes(wanted, "host_cache_memory")
        if wanted is not None and memory < page_bytes:
            raise ValueError(
                f"host_cache_memory {wanted!r} is {memory:,} bytes on each rank, less than a page of {page_bytes:,}; "
                "raise it, or leave it out"
            )
        if options.cache_folder is None:
            return cls(memory // page_bytes, 0, exchanged)
        # A rank reads and writes its part of a request's pages.
        own = math.ceil(pages_for(max_model_len, options.page_size) / mesh.cp_size)
        transit = max(1, min(own, _TRANSIT // page_bytes))
        return cls(memory // page_bytes or transit, transit, exchanged)

    def with_hot_rows(
        self,
        options: EngineOptions,
        mesh: Mesh,
        config: ModelConfig,
        format: CacheFormat,
        max_model_len: int,
        for_steps: int,
    ) -> tuple[int, TierSizes]:
        """The number of resident pages, and these sizes where some may spill to ``host_cache_memory``."""
        page_size, sets = options.page_size, cdiv(options.max_num_seqs * mesh.dcp.size, mesh.world_size)
        of = HotBytes.of(config, format, page_size, sets, options.hot_rows)
        memory, useful = _cache_memory(options, mesh, for_steps), _useful_pages(options, mesh, max_model_len)
        host = parse_bytes(options.host_cache_memory or 0, "host_cache_memory")
        spilled = min(mesh.all_gather_int(of.divide(memory, host, useful)[1]))
        rest = max(0, memory - of.rows - spilled * of.keys) // of.page
        pages, least = min(mesh.all_gather_int(min(useful, rest))), least_resident(options.num_drafts, page_size)
        if not spilled or pages < least:
            raise CapacityError(
                f"the caches are too small for hot_rows {options.hot_rows:,}: {sets} sets of them take "
                f"{format_bytes(of.rows)} of {format_bytes(memory)}, a resident page of {page_size} tokens "
                f"{format_bytes(of.page)} and a spilled one {format_bytes(of.keys)}, and {format_bytes(of.latent)} of "
                f"host_cache_memory; so there are {pages} resident pages of at least {least}, and {spilled} spilled "
                "ones of at least 1; raise cache_memory or host_cache_memory, or lower hot_rows or max_num_seqs"
            )
        return pages, self._replace(host=(host - spilled * of.latent) // of.page, spilled=spilled, sets=sets)

    def device_bytes(self, mesh: Mesh, config: ModelConfig, format: CacheFormat, page_size: int) -> int:
        layers = pool_page_bytes(config, format, page_size)
        staging = staging_bytes(max(map(max, layers))) if self.slots and mesh.device.type == "cuda" else 0
        return staging + exchange_bytes(max(map(sum, layers)), self.exchanged)

    def warm_up(self, mesh: Mesh) -> None:
        """Runs a collective of the kind that fetches pages, for which NCCL allocates buffers when it runs first: before
        the memory for the caches is counted. Every rank calls it."""
        if self.exchanged:
            mesh.cp.all_to_all(torch.zeros(mesh.cp.size, 1, device=mesh.device))

    def transfer(self, cache: KVCache, mesh: Mesh) -> PageTransfer | None:
        """Makes host memory, and what moves pages to it and to other ranks; None if there is neither."""
        if not self.slots and not self.exchanged:
            return None
        host = HostPages(cache, self.slots) if self.slots else None
        return PageTransfer(cache, mesh.cp, host, self.exchanged)

    @property
    def slots(self) -> int:
        return self.host + self.to_disk


def page_folder(options: EngineOptions, path: Path, model: Model, format: CacheFormat) -> PageFolder | None:
    """The folder of the option ``cache_folder``, if any, for the pages of a model. ``path``: the folder of the model's
    checkpoint."""
    if options.cache_folder is None:
        return None
    config, runtime, modules = model.config, model.runtime, min(options.num_drafts, len(model.mtp))
    # All that rows depend on, without the number of ranks.
    facts: dict[str, object] = {
        "model_type": config.model_type,
        "configuration": _digest(repr(config)),
        "checkpoint": f"random, seed {options.seed}" if options.load_format == "dummy" else checkpoint_digest(path),
        "weights": type(runtime.weights).__name__,
        "dtype": str(runtime.dtype).removeprefix("torch."),
        "cache": repr(format),
        "page_size": options.page_size,
        "mtp_modules": modules,  # those that write rows
        "format": VERSION,
        "dsa_engine": __version__,
    }
    key, about = _digest(json.dumps(facts, sort_keys=True)), {"model": str(options.model), "cache_dtype": format.name}
    limit = None if options.cache_folder_size is None else parse_bytes(options.cache_folder_size, "cache_folder_size")
    try:
        return PageFolder(Path(options.cache_folder).expanduser(), limit, key, about | facts)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"cache_folder {str(options.cache_folder)!r} cannot be made: {error}; give a folder that this user may "
            "write, or leave it out"
        ) from error


def _digest(text: str) -> str:
    return blake2b(text.encode(), digest_size=16).hexdigest()
