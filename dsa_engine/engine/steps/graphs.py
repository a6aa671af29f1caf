"""Decode steps of static shape, captured as CUDA graphs.

A decode step has few tokens and many small kernels, and the host cannot launch them as fast as the GPU runs them. A
graph launches a whole step at once, but repeats exactly what was captured: same shapes, same addresses. So a step is
padded to a bucket, and its inputs are copied into buffers with fixed addresses (``static_rows.py``). A bucket has a
power of two of requests and one of a few context lengths (``context_buckets.py``). In a padded step all rows take one
form of attention: with an indexer all rows select, and rows that see few tokens select all of them.

On a CPU a :class:`.Recording` takes the place of a graph, of steps of few rows, which are not padded to more requests:
rows cost time there. Where it cannot repeat a step, steps of as many rows are no longer padded.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Callable, Hashable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import NamedTuple

import torch

from dsa_engine.engine.steps.batch import known_ids
from dsa_engine.engine.steps.context_buckets import Bucket, ContextBuckets
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.engine.steps.static_rows import StaticRows, block_tables_of
from dsa_engine.kernels.runtime.recording import Blocks, Recording
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.profile_stages import has_hook
from dsa_engine.system.interrupts import uninterrupted

logger = logging.getLogger(__name__)


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph | Recording
    result: torch.Tensor  # overwritten by every replay


class _Inputs(NamedTuple):
    """Tensors of a bucket with fixed addresses; all but the first are overwritten in every step."""

    rows: StaticRows
    tables: torch.Tensor  # int32, block tables, see BlockTables.shape
    positions: torch.Tensor  # [rows] int64, -1 for padding
    token_ids: torch.Tensor  # [rows] int64


class DecodeGraphs:
    """Runs steps that are padded to buckets, as graphs or recordings, or without ``capture`` kernel by kernel."""

    def __init__(self, model: Model, cache: KVCache, *, capture: bool = True, contexts: ContextBuckets | None = None):
        self._model = model
        self._cache = cache
        self._mesh = model.runtime.mesh
        self._capture = capture
        self.contexts = contexts or ContextBuckets()
        self._inputs: dict[Bucket, _Inputs] = {}
        self._graphs: dict[Hashable, _Captured] = {}  # by the name given to run()
        # One stream for all captures: cuBLAS keeps a workspace for every stream that it has run on, and the graphs of a
        # pool reuse each other's memory on the same stream only.
        on_cuda = capture and self._mesh.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_cuda else None
        self._stream = torch.cuda.Stream(self._mesh.device) if on_cuda else None
        self._blocks = Blocks(list)  # shared by recordings: a result is read before another graph runs
        self.memory_bytes = 0  # device memory of the captured graphs
        if on_cuda:
            # NCCL ends a communicator only when no graph uses it: graphs are freed before the mesh at exit.
            atexit.register(_close, weakref.ref(self))

    def close(self) -> None:
        """Frees the captured graphs and their memory; the next step captures again."""
        if self._graphs and self._stream is not None:
            torch.cuda.synchronize(self._mesh.device)
            for captured in self._graphs.values():
                assert isinstance(captured.graph, torch.cuda.CUDAGraph)
                captured.graph.reset()
        self._graphs.clear()
        self._inputs.clear()
        self._blocks.clear()
        self.memory_bytes = 0

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Rows and longest context, in tokens, of the graphs captured so far."""
        return sorted((bucket.rows, bucket.context) for bucket in map(_bucket_of, self._graphs))

    def ready(self, name: Hashable) -> bool:
        """Whether :meth:`run` has nothing to capture for this name; :meth:`forward` uses the step's bucket as name."""
        return not self._capture or name in self._graphs

    def forward(self, step: StepPlan, sampled: torch.Tensor | None) -> torch.Tensor:
        """Runs a padded step; returns hidden states ``[rows of the bucket, hidden]``, valid until the next call. For
        ``sampled`` see :func:`.known_ids`."""
        bucket, device, cache = step.bucket, self._mesh.device, self._cache
        assert bucket is not None, "a step is padded before it is run here"
        if bucket not in self._inputs:
            rows = StaticRows.of(bucket, bucket.rows_per_request, self._model, cache)
            shape = cache.block_tables.shape(bucket.requests, bucket.context)
            tables = torch.zeros(shape, dtype=torch.int32, device=device)
            self._inputs[bucket] = _Inputs(rows, tables, *torch.zeros(2, bucket.rows, dtype=torch.int64, device=device))
        rows, tables, positions, token_ids = self._inputs[bucket]
        block_tables_of(step.of_group or [step.own.chunks], cache, tables.shape, out=tables)
        upload(step.own.positions, device, out=positions)
        token_ids.copy_(known_ids(step.own.token_ids(bucket.rows), sampled, device))
        return self.run(bucket, lambda: self._model(rows.batch(tables, positions, token_ids), cache))

    def run(self, name: Hashable, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Runs ``function``; its result is valid until the next call. The first call with a name captures the function,
        later calls replay the graph: so it must launch the same kernels on the same tensors every time."""
        # Timing events and the log of collectives do not work in a graph, so a step with such a hook runs without.
        if not self._capture or has_hook():
            return function()
        if name not in self._graphs:
            if self._stream is None:
                return self._recorded(name, function)
            self._graphs[name] = self._captured_once(function, self._stream)
        captured = self._graphs[name]
        captured.graph.replay()
        return captured.result

    def _recorded(self, name: Hashable, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        recording = Recording(function, self._blocks)
        if recording.refused:
            rows = _bucket_of(name).rows
            logger.info("steps of %d rows and more are not recorded: %s reads numbers", rows, recording.refused)
            self.contexts = replace(self.contexts, exact_rows=rows - 1)
            return recording.result
        self._graphs[name] = _Captured(recording, recording.result)
        self.memory_bytes = recording.memory_bytes
        return recording.result

    def _captured_once(self, function: Callable[[], torch.Tensor], stream: torch.cuda.Stream) -> _Captured:
        device = self._mesh.device
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # A run without capturing first: kernels are compiled, libraries allocate workspaces, lazy tensors are made.
            # It writes the same cache rows as the step itself.
            loads = self._model.loads
            with loads.paused() if loads is not None else nullcontext():
                function()
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which empties the memory caches of the whole process, other engines' too.
            # thread_local, as other threads, such as NCCL's watchdog, may call CUDA meanwhile.
            with uninterrupted():  # an interrupt between the two would leave side streams in the capture
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = function()
                except BaseException:
                    with suppress(RuntimeError):  # that streams have not joined; the cause is the function's error
                        graph.capture_end()
                    raise
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.memory_bytes += torch.cuda.memory_reserved(device) - before
        return _Captured(graph, result)


def _bucket_of(name: Hashable) -> Bucket:
    """The bucket of a step, or of a step with drafts (:class:`.GraphKey`)."""
    bucket = name[0] if isinstance(name, tuple) else name
    assert isinstance(bucket, Bucket)
    return bucket


def _close(graphs: weakref.ref[DecodeGraphs]) -> None:
    alive = graphs()
    if alive is not None:
        alive.close()
