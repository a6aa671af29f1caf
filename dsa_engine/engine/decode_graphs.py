"""Decode steps of static shape, captured as CUDA graphs.

A decode step has few tokens and many small kernels, and the host cannot launch them as fast as the GPU runs them. A
graph launches a whole step at once, but repeats exactly what was captured: same shapes, same addresses. So a step is
padded to a bucket, a power of two both in its number of sequences and in the length of its longest context, and its
inputs are copied into buffers that stay. In a padded step every row takes one path: all rows select, those that see few
tokens get all of them. The same padded step can be run without capturing, on a CPU too, which is how it is tested.

All ranks choose the same bucket, since every rank knows the step of every other: so all capture at the same time, and
collectives meet.
"""

from __future__ import annotations

import atexit
import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from triton import next_power_of_2

from dsa_engine.engine.batch import ForwardBatch, RankPlan, StepPlan, block_tables, known_ids
from dsa_engine.engine.pages import pages_for
from dsa_engine.kernels.paged import slots_of
from dsa_engine.kernels.segment import Segment, Segments
from dsa_engine.kernels.transfer import upload
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.kv_cache import KVCache
from dsa_engine.model.model import Model
from dsa_engine.model.stages import observed
from dsa_engine.parallel import Mesh


@dataclass
class _Bucket:
    batch: ForwardBatch
    hidden: torch.Tensor | None = None  # where a replay leaves its result
    graph: torch.cuda.CUDAGraph | None = None


class DecodeGraphs:
    """Runs decode steps in buckets.

    Args:
        model, cache, config, mesh: of the engine.
        capture: replay CUDA graphs; False runs the same padded steps kernel by kernel.
        fewest_tokens: of a context bucket: shorter contexts gain nothing from graphs of their own.
    """

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        config: ModelConfig,
        mesh: Mesh,
        *,
        capture: bool = True,
        fewest_tokens: int = 4096,
    ):
        self._model = model
        self._cache = cache
        self._config = config
        self._mesh = mesh
        self._capture = capture
        self._fewest_tokens = fewest_tokens
        self._buckets: dict[tuple[int, int], _Bucket] = {}
        self._pool = torch.cuda.graph_pool_handle() if capture else None
        self.memory_bytes = 0  # what the captured graphs hold on the device
        if capture:
            # NCCL ends a communicator only when no graph holds it any more: graphs go before the mesh does at exit.
            atexit.register(_close, weakref.ref(self))

    def close(self) -> None:
        """Gives the captured graphs and their memory back; the next step captures anew."""
        if self.captured:
            torch.cuda.synchronize(self._mesh.device)
            for bucket in self._buckets.values():
                if bucket.graph is not None:
                    bucket.graph.reset()
        self._buckets.clear()
        self.memory_bytes = 0

    @property
    def captured(self) -> list[tuple[int, int]]:
        """Sequences and longest context, in tokens, of the graphs captured so far."""
        return sorted(key for key, bucket in self._buckets.items() if bucket.graph is not None)

    def ready(self, step: StepPlan) -> bool:
        """Whether :meth:`forward` has nothing to capture first."""
        bucket = self._buckets.get(self._key(step))
        return not self._capture or (bucket is not None and bucket.graph is not None)

    def forward(self, step: StepPlan, sampled: torch.Tensor | None) -> torch.Tensor:
        """Hidden states ``[rows of this rank, hidden]`` of a decode step, valid until the next call.

        ``sampled`` are the tokens of the step before, where they have not been read (``batch.known_ids``).
        """
        mine = step.ranks[self._mesh.rank]
        bucket = self._bucket(step)
        _fill(bucket.batch, step, self._config, self._mesh, self._cache.page_size, sampled)
        # Timing events and the log of collectives do not work in a graph: a step that is watched runs without.
        if not self._capture or observed():
            return self._model(bucket.batch, self._cache)[: mine.rows]
        if bucket.graph is None:
            self._capture_bucket(bucket)
        assert bucket.graph is not None and bucket.hidden is not None
        bucket.graph.replay()
        return bucket.hidden[: mine.rows]

    def _key(self, step: StepPlan) -> tuple[int, int]:
        rows = next_power_of_2(max(plan.rows for plan in step.ranks))
        longest = max(chunk.end for plan in step.ranks for chunk in plan.chunks)
        context = next_power_of_2(max(longest, self._fewest_tokens))
        return rows, context

    def _bucket(self, step: StepPlan) -> _Bucket:
        key = self._key(step)
        if key not in self._buckets:
            self._buckets[key] = _Bucket(_empty_batch(*key, self._config, self._mesh, self._cache))
        return self._buckets[key]

    def _capture_bucket(self, bucket: _Bucket) -> None:
        device = self._mesh.device
        # Once without capturing: kernels are compiled, libraries take their workspaces, lazy tensors are made. The rows
        # that this writes to the cache are those of the step itself.
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            self._model(bucket.batch, self._cache)
        torch.cuda.current_stream(device).wait_stream(side)
        # What capturing would free is none of its own memory.
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, such as NCCL's watchdog, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            bucket.hidden = self._model(bucket.batch, self._cache)
        bucket.graph = graph
        self.memory_bytes += torch.cuda.memory_reserved(device) - before


def _close(graphs: weakref.ref[DecodeGraphs]) -> None:
    alive = graphs()
    if alive is not None:
        alive.close()


def _empty_batch(rows: int, context: int, config: ModelConfig, mesh: Mesh, cache: KVCache) -> ForwardBatch:
    """A batch of ``rows`` padding rows, in which a row may see up to ``context`` tokens."""
    device = mesh.device

    def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    runs = [Segment(row, 1, row, context - 1) for row in range(rows)]
    numbers = torch.arange(rows, dtype=torch.int32, device=device)
    segments = Segments(tuple(runs), numbers, buffer(rows, dtype=torch.int32))
    selects = config.has_indexer
    plan = RankPlan(absorbed=[] if selects else runs, sparse=runs if selects else [], rows=rows)
    nothing = Segments.of([], device)
    angles = config.qk_rope_head_dim // 2
    return ForwardBatch(
        plan=plan,
        input_ids=buffer(mesh.tp.size, rows, dtype=torch.int64),
        cos=buffer(rows, angles, dtype=torch.float32),
        sin=buffer(rows, angles, dtype=torch.float32),
        absorbed=nothing if selects else segments,
        sparse=segments if selects else nothing,
        block_tables=buffer(rows, pages_for(context, cache.page_size), dtype=torch.int32),
        slot_mapping=buffer(rows, dtype=torch.int32),
        gathers=False,
        cp_rows=rows,
        tp_rows=rows,
        ep_rows=rows,
        decodes=True,
        live=buffer(rows, dtype=torch.bool),
    )


def _fill(
    batch: ForwardBatch,
    step: StepPlan,
    config: ModelConfig,
    mesh: Mesh,
    page_size: int,
    sampled: torch.Tensor | None,
) -> None:
    """Copies a step into the buffers of its bucket; the rows behind it become padding."""
    rows, mine = batch.plan.rows, step.ranks[mesh.rank]
    ids = [p.token_ids() + [0] * (rows - p.rows) for p in (step.ranks[r] for r in mesh.tp.ranks)]
    positions, sequences = mine.positions(), mine.sequences()
    tables = block_tables([mine.chunks[number].request.pages for number in sequences.tolist()])
    tables = F.pad(tables, (0, batch.block_tables.shape[1] - tables.shape[1], 0, rows - mine.rows))
    slots = slots_of(positions, tables, torch.arange(mine.rows), page_size)
    cos, sin = config.rope.cos_sin(positions)

    def padded(x: torch.Tensor, value: int = 0) -> torch.Tensor:
        return F.pad(x, (0, 0) * (x.dim() - 1) + (0, rows - mine.rows), value=value)

    visible = padded((positions + 1).int())
    batch.input_ids.copy_(known_ids(torch.tensor(ids, dtype=torch.int64), sampled, mesh.device))
    for buffer, values in (
        (batch.cos, padded(cos)),
        (batch.sin, padded(sin)),
        (batch.block_tables, tables),
        (batch.slot_mapping, padded(slots, -1)),
        ((batch.sparse if config.has_indexer else batch.absorbed).visible, visible),
        (batch.live, visible > 0),
    ):
        assert buffer is not None
        upload(values, mesh.device, out=buffer)
