"""Decode steps of static shape, captured as CUDA graphs.

A decode step has few tokens and many small kernels, and the host cannot launch them as fast as the GPU runs them. A
graph launches a whole step at once, but repeats exactly what was captured: same shapes, same addresses. So a step is
padded to a bucket, a power of two in its number of requests, and in the length of its longest context one of a few
(`context_buckets.py`), and its inputs are copied into buffers that stay. In a padded step all rows take one form of
attention: all select, those that see few tokens get all of them. The same padded step can be run without capturing, on
a CPU too, which is how it is tested.

All ranks choose the same bucket, since every rank knows the step of every other: so all capture at the same time, and
collectives meet.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.batch import build_batch
from dsa_engine.engine.steps.context_buckets import ContextBuckets
from dsa_engine.engine.steps.plan import Bucket, StepPlan
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.profile_stages import observed
from dsa_engine.parallel import Mesh


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    result: torch.Tensor  # where a replay leaves it


class DecodeGraphs:
    """Runs decode steps that are padded to buckets.

    Args:
        model, cache, config, mesh: of the engine.
        capture: replay CUDA graphs; False runs the same padded steps kernel by kernel.
        contexts: that the longest context of a step is padded to.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: ModelConfig,
        mesh: Mesh,
        *,
        capture: bool = True,
        contexts: ContextBuckets | None = None,
    ):
        self._model = model
        self._cache = cache
        self._config = config
        self._mesh = mesh
        self._capture = capture
        self._contexts = contexts or ContextBuckets()
        self._batches: dict[Bucket, ForwardBatch] = {}  # whose tensors are written anew in every step
        self._graphs: dict[Hashable, _Captured] = {}  # of a bucket, or of what is run behind one
        # Of this engine alone. cuBLAS keeps a workspace for every stream that it has run on, and memory goes from one
        # graph of a pool to the next on the same stream only: so all are warmed up and captured on one.
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self._stream = torch.cuda.Stream(mesh.device) if capture else None
        self.memory_bytes = 0  # what the captured graphs hold on the device
        if capture:
            # NCCL ends a communicator only when no graph holds it any more: graphs go before the mesh does at exit.
            atexit.register(_close, weakref.ref(self))

    def close(self) -> None:
        """Gives the captured graphs and their memory back; the next step captures anew."""
        if self._graphs:
            torch.cuda.synchronize(self._mesh.device)
            for captured in self._graphs.values():
                captured.graph.reset()
        self._graphs.clear()
        self._batches.clear()
        self.memory_bytes = 0

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Rows and longest context, in tokens, of the graphs captured so far."""
        buckets = [name[0] if isinstance(name, tuple) else name for name in self._graphs]
        return sorted((bucket.rows, bucket.context) for bucket in buckets if isinstance(bucket, Bucket))

    def pad(self, step: StepPlan, num_drafts: int = 0) -> StepPlan:
        """A decode step, with drafts made behind it, in the rows of its bucket, as :meth:`forward` runs it."""
        return step.padded(self._config, self._contexts, num_drafts)

    def ready(self, name: Hashable) -> bool:
        """Whether :meth:`run` has nothing to capture first; the name of :meth:`forward` is the step's bucket."""
        return not self._capture or name in self._graphs

    def forward(self, step: StepPlan, sampled: torch.Tensor | None) -> tuple[ForwardBatch, torch.Tensor]:
        """The bucket's batch and hidden states ``[rows of the bucket, hidden]`` of a padded step, valid until the next
        call.

        ``sampled`` are the tokens of the step before, where they have not been read (``batch.known_ids``).
        """
        bucket = step.bucket
        assert bucket is not None, "a step is padded before it is run here"
        kept = self._batches.get(bucket)
        batch = build_batch(step, self._config, self._mesh, self._cache.block_tables, sampled, kept)
        self._batches[bucket] = batch
        return batch, self.run(bucket, lambda: self._model(batch, self._cache))

    def run(self, name: Hashable, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What ``function`` returns, valid until the next call with this name.

        It is captured at the first call and then replayed: it must do the same on the same tensors every time.
        """
        # Timing events and the log of collectives do not work in a graph: a step that is watched runs without.
        if not self._capture or observed():
            return function()
        if name not in self._graphs:
            self._graphs[name] = self._captured_once(function)
        captured = self._graphs[name]
        captured.graph.replay()
        return captured.result

    def _captured_once(self, function: Callable[[], torch.Tensor]) -> _Captured:
        device, stream = self._mesh.device, self._stream
        assert stream is not None, "graphs are captured where capturing was asked for"
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # Once without capturing: kernels are compiled, libraries take their workspaces, lazy tensors are made. The
            # rows that this writes to the cache are those of the step itself.
            function()
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_reserved(device)
            graph = torch.cuda.CUDAGraph()
            # Not torch.cuda.graph(), which empties the memory caches of the whole process, other engines' too. Other
            # threads, such as NCCL's watchdog, may call CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.memory_bytes += torch.cuda.memory_reserved(device) - before
        return _Captured(graph, result)


def _close(graphs: weakref.ref[DecodeGraphs]) -> None:
    alive = graphs()
    if alive is not None:
        alive.close()
