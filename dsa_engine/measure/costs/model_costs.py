"""Operations and bytes of one rank: for a forward pass, a decode step with its drafts, and a prefill.

Operations are those of matrix products, two for a multiply-add, and two per head that weigh an index score. Bytes
are the minimum that a step reads: each weight that is used once, each index key once for all rows of its
sequence, each latent row once for every row that selected it (in dense form once for all rows of its sequence).
Activations are not counted: in small steps they stay in the device's caches, and in large ones products take longer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.plan import RankPlan, StepPlan
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.rows.segment import Segment
from dsa_engine.model.rank_weights import WeightBytes, layer_matrices
from dsa_engine.sampling_params import SamplingParams


@dataclass(slots=True)  # not frozen: a plan makes a million
class Work:
    """Work of one stage, or of several."""

    flops: float = 0.0
    weights: float = 0.0  # bytes read
    index_keys: float = 0.0  # bytes read
    latent_rows: float = 0.0  # bytes read

    def __add__(self, other: Work) -> Work:
        read = self.weights + other.weights, self.index_keys + other.index_keys, self.latent_rows + other.latent_rows
        return Work(self.flops + other.flops, *read)

    def __mul__(self, times: float) -> Work:
        return Work(self.flops * times, self.weights * times, self.index_keys * times, self.latent_rows * times)

    @property
    def bytes_read(self) -> float:
        """Bytes of weights and cache rows."""
        return self.weights + self.index_keys + self.latent_rows


Stages = dict[str, Work]


def add(*parts: Stages) -> Stages:
    """The sum, stage by stage."""
    total: Stages = {}
    for part in parts:
        for name, work in part.items():
            total[name] = total[name] + work if name in total else work
    return total


def times(stages: Stages, factor: float) -> Stages:
    return {name: work * factor for name, work in stages.items()}


class Attended(NamedTuple):
    """The rows of one form of attention."""

    rows: int = 0
    pairs: int = 0  # query-key pairs under the causal mask
    keys: int = 0  # tokens that the last row of each segment sees, summed over segments

    @classmethod
    def of(cls, segments: Iterable[Segment]) -> Attended:
        given = list(segments)
        return cls(sum(s.length for s in given), sum(s.visible_pairs for s in given), sum(s.end for s in given))


@dataclass(frozen=True)
class Shape:
    """The rows of one rank in a forward pass, by form of attention (:class:`~dsa_engine.model.forward_batch`)."""

    mha: Attended
    dense: Attended
    sparse: Attended
    logits: int  # rows whose logits are computed

    @classmethod
    def of(cls, plan: RankPlan) -> Shape:
        mha, dense, sparse = (Attended.of(form) for form in (plan.mha, plan.dense_mqa, plan.sparse_mqa))
        return cls(mha, dense, sparse, len(plan.wanted))

    @property
    def rows(self) -> int:
        return self.mha.rows + self.dense.rows + self.sparse.rows


class Served(NamedTuple):
    """Work of a rank's routed experts in a layer."""

    pairs: float  # token-expert pairs
    experts: float  # experts with at least one pair

    @classmethod
    def evenly(cls, tokens: float, top_k: int, held: int, experts: int) -> Served:
        """Every expert chosen equally often by ``tokens`` tokens of all ranks: the mean of independent choices."""
        return cls(tokens * top_k * held / experts, held * (1 - (1 - top_k / experts) ** tokens))


class Decode(NamedTuple):
    """A decode step of a rank."""

    requests: int  # requests of this rank
    world_requests: int  # requests of all ranks
    context: int  # tokens that a request's last row sees
    drafts: int = 0  # checked in the step; as many are drafted after it


class ModelCosts:
    """Work of one rank's forward passes. ``itemsize``: bytes of an element of the embedding."""

    def __init__(self, config: ModelConfig, weights: WeightBytes, cache: CacheFormat, itemsize: int = 2):
        self.config, self.weights, self.cache, self.itemsize = config, weights, cache, itemsize
        self.matrices = layer_matrices(config)

    @classmethod
    def of(cls, engine: Engine) -> ModelCosts:
        """The costs of an engine's rank."""
        return cls(engine.config, WeightBytes.of(engine.model), engine.cache.format, engine.dtype.itemsize)

    def served(self, tokens: float) -> Served:
        """Work of the rank's experts when all ranks together have ``tokens`` rows."""
        c = self.config
        return Served.evenly(tokens, c.num_experts_per_tok, self.weights.held, c.n_routed_experts)

    def forward(self, shape: Shape, served: Served) -> Stages:
        """All layers, the embedding of the rows, and the logits of the rows that need them."""
        c = self.config
        kinds = list(zip(c.mlp_layer_types, c.indexer_types, strict=True))[: c.num_hidden_layers]
        layers = [times(self.layer(*kind, shape, served), kinds.count(kind)) for kind in dict.fromkeys(kinds)]
        return add(self.embedding(shape.rows), *layers, self.head(shape.logits))

    def embedding(self, rows: int) -> Stages:
        return {"embedding": Work(weights=self.itemsize * rows * self.config.hidden_size)}

    def layer(self, mlp: str, indexer: str, shape: Shape, served: Served) -> Stages:
        """A layer, by its entries of ``mlp_layer_types`` and ``indexer_types``; "projections" are all products with
        weights but those of the routed experts."""
        c, weights, matrices = self.config, self.weights.layers[(mlp, indexer)], self.matrices[(mlp, indexer)]
        heads, sparse, stages = c.num_attention_heads, shape.sparse, Stages()
        if mlp == "sparse":
            products, read = matrices.expert * served.pairs, weights.expert * served.experts
            stages["MoE experts"] = Work(2 * products, weights=read)
        products = shape.rows * matrices.rows + (shape.rows - shape.mha.rows) * matrices.up
        products += sparse.rows * matrices.queries  # without sparse rows only the keys are computed
        read = (weights.rows if shape.rows else 0.0) + (weights.queries if sparse.rows else 0.0)
        if indexer == "full":
            assert self.cache.index_key is not None
            stages["lightning indexer"] = Work(
                2 * sparse.pairs * c.index_n_heads * (c.index_head_dim + 1),
                index_keys=self.cache.index_key.row_bytes * sparse.keys,
            )
        stages["projections"] = Work(2 * products, weights=read)
        chosen = sparse.rows * c.index_topk
        mqa = (shape.dense.pairs + chosen) * heads * (c.latent_dim + c.kv_lora_rank)
        mha = shape.mha.keys * matrices.up + shape.mha.pairs * heads * (c.qk_head_dim + c.v_head_dim)
        stages["sparse flash attention"] = Work(
            2 * (mqa + mha), latent_rows=self.cache.latent.row_bytes * (chosen + shape.dense.keys + shape.mha.keys)
        )
        return stages

    def head(self, rows: int) -> Stages:
        c = self.config
        return {"LM head": Work(2 * rows * c.hidden_size * c.vocab_size, weights=self.weights.head)} if rows else {}

    def module(self, shape: Shape, served: Served) -> Stages:
        """A pass of the MTP module, and the logits of its drafts."""
        c = self.config
        joined = Work(4 * shape.rows * c.hidden_size**2, weights=self.weights.module)
        layer = self.layer("sparse", "full" if c.has_indexer else "none", shape, served)
        return add(self.embedding(shape.rows), {"projections": joined}, layer, self.head(shape.logits))

    def decode(self, step: Decode) -> Stages:
        """A decode step: a pass in which every request has a row for its last token and one for each draft, and the
        passes of the MTP module that draft."""
        config, rows = self.config, 1 + step.drafts
        served, alone = self.served(step.world_requests * rows), self.served(step.world_requests)
        checked = _decode_shape(config, step, rows)
        passes = [self.forward(checked, served)]
        if step.drafts:
            passes.append(self.module(replace(checked, logits=step.requests), served))
            later = self.module(_decode_shape(config, step, 1), alone)
            if config.index_share_for_mtp_iteration:
                del later["lightning indexer"]
            passes.append(times(later, step.drafts - 1))
        return add(*passes)

    def prefill(self, steps: Sequence[StepPlan], rank: int, drafts: int = 0, groups: float = 1) -> Stages:
        """The steps of a prefill, on one rank; with an MTP module also its passes over the same rows.

        ``groups`` context-parallel groups are assumed to do the same at the same time; the mean, if they do not
        divide evenly.
        """
        passes: list[Stages] = []
        for step in steps:
            work = Shape.of(step.of_rank(rank)), self.served(groups * sum(step.rows))
            passes += [self.forward(*work), self.module(*work)] if drafts else [self.forward(*work)]
        return add(*passes)


@lru_cache(maxsize=256)
def prefill_plans(
    config: ModelConfig, tokens: int, cp_size: int, chunk: int, world_size: int | None = None
) -> list[StepPlan]:
    """Step plans of a prompt's prefill by the first context-parallel group, at most ``chunk`` tokens of a rank in a
    step; ``world_size`` ranks (default: the group's) have a plan."""
    request, maximum = Request(-1, array("i", bytes(4 * tokens)), SamplingParams()), chunk * cp_size
    each = [(first, min(maximum, tokens - first)) for first in range(0, tokens, maximum)]
    chunks = [Chunk(request, first, count, range(cp_size)) for first, count in each]
    return [StepPlan.of([one], 0, world_size or cp_size, config) for one in chunks]


def prefill_plans_of(engine: Engine, tokens: int) -> list[StepPlan]:
    """The same for all ranks of an engine."""
    mesh = engine.mesh
    return prefill_plans(engine.config, tokens, mesh.cp_size, engine.options.max_num_batched_tokens, mesh.world_size)


@lru_cache(maxsize=256)
def _decode_shape(config: ModelConfig, step: Decode, rows: int) -> Shape:
    """The requests of a step, of one length, each with ``rows`` rows at its end."""
    request = Request(-1, array("i", bytes(4 * step.context)), SamplingParams())
    alone = Shape.of(StepPlan.of([Chunk(request, step.context - rows, rows, range(1), rows)], 0, 1, config).own)
    forms = (alone.mha, alone.dense, alone.sparse)
    mha, dense, sparse = (Attended(*(n * step.requests for n in form)) for form in forms)
    return Shape(mha, dense, sparse, step.requests * rows)
