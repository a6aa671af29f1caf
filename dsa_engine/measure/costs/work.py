"""Operations and bytes of one decoder layer, stage by stage, for the rows that one rank computes in a forward pass.

Operations are those of matrix products, two for a multiply-add, and two per head that weigh an index score. Bytes
read are the minimum of a step: each weight that is used once, each index key once for all rows of its
sequence, each latent row once for every row that selected it (in dense form once for all rows of its sequence).
Activations, the inputs and outputs of products and kernels, are counted separately: in small steps they stay in the
device's caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.steps.plan import RankPlan
from dsa_engine.kernels.formats.cache_format import CacheFormat
from dsa_engine.kernels.rows.segment import Segment

SCORE_BYTES = 4  # an index score is float32


@dataclass(frozen=True)
class Work:
    """Work of one stage, or of several."""

    flops: float = 0.0
    narrow_flops: float = 0.0  # operations with 8-bit inputs, a part of flops
    weights: float = 0.0  # bytes read
    index_keys: float = 0.0  # bytes read
    latent_rows: float = 0.0  # bytes read
    activations: float = 0.0  # bytes read and written
    passes: float = 0.0  # how often the stage runs: once per layer and forward pass

    def __add__(self, other: Work) -> Work:
        return Work(*map(float.__add__, self._figures(), other._figures()))

    def __mul__(self, times: float) -> Work:
        return Work(*(figure * times for figure in self._figures()))

    def _figures(self) -> tuple[float, ...]:
        counted = (self.flops, self.narrow_flops, self.weights, self.index_keys, self.latent_rows, self.activations)
        return (*map(float, counted), self.passes)

    @property
    def bytes_read(self) -> float:
        """Bytes of weights and cache rows."""
        return self.weights + self.index_keys + self.latent_rows

    @property
    def bytes_moved(self) -> float:
        return self.bytes_read + self.activations


Stages = dict[str, Work]


def add(*parts: Stages) -> Stages:
    """The sum, stage by stage."""
    total: Stages = {}
    for part in parts:
        for name, work in part.items():
            total[name] = total.get(name, Work()) + work
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
        sums = (sum(s.length for s in given), sum(s.visible_pairs for s in given), sum(s.end for s in given))
        return cls(*sums)


@dataclass(frozen=True)
class Shape:
    """The rows of one rank in a forward pass, by form of attention (:class:`~dsa_engine.model.forward_batch`)."""

    mha: Attended
    dense: Attended
    sparse: Attended
    logits: int  # rows whose logits are computed
    gathered: int = 0  # rows of the context-parallel group, whose cache rows are gathered and stored

    @classmethod
    def of(cls, plan: RankPlan, logits: int | None = None) -> Shape:
        """The shape of a rank's plan; ``logits`` replaces the plan's number of rows with logits."""
        mha, dense, sparse = (Attended.of(form) for form in (plan.mha, plan.dense_mqa, plan.sparse_mqa))
        return cls(mha, dense, sparse, len(plan.logits_rows) if logits is None else logits)

    def __add__(self, other: Shape) -> Shape:
        forms = ((self.mha, other.mha), (self.dense, other.dense), (self.sparse, other.sparse))
        mha, dense, sparse = (Attended(*map(int.__add__, mine, theirs)) for mine, theirs in forms)
        return Shape(mha, dense, sparse, self.logits + other.logits, self.gathered + other.gathered)

    @property
    def rows(self) -> int:
        return self.mha.rows + self.dense.rows + self.sparse.rows


class Served(NamedTuple):
    """Work of a rank's routed experts in a layer."""

    pairs: float  # token-expert pairs
    experts: float  # experts with at least one pair

    @classmethod
    def evenly(cls, tokens: float, top_k: int, held: int, experts: int) -> Served:
        """Every expert chosen equally often: the mean of independent choices.

        Args:
            tokens: number of tokens of all ranks together.
            top_k: experts per token.
            held: number of experts of this rank.
            experts: number of all experts.
        """
        return cls(tokens * top_k * held / experts, held * (1 - (1 - top_k / experts) ** tokens))


class Formats(NamedTuple):
    """Formats of stored numbers, and the products with 8-bit inputs."""

    cache: CacheFormat
    itemsize: int  # bytes of an activation
    narrow_linear: bool = False
    narrow_experts: bool = False


def attention_work(
    config: ModelConfig, indexer: str, shape: Shape, weights: dict[str, float], formats: Formats
) -> Stages:
    """The five stages of attention.

    Args:
        indexer: the layer's entry of ``config.indexer_types``.
        weights: bytes of the layer's weights by stage.
    """
    c, a, rows = config, formats.itemsize, shape.rows
    heads, latent, rank, value = c.num_attention_heads, c.latent_dim, c.kv_lora_rank, c.v_head_dim
    absorbed = rows - shape.mha.rows
    stages: Stages = {}
    projected = 2 * rows * (c.hidden_size * (c.q_lora_rank + latent) + c.q_lora_rank * heads * c.qk_head_dim)
    stages["MLA prolog"] = Work(
        projected + 2 * absorbed * heads * c.qk_nope_head_dim * rank,
        projected * formats.narrow_linear,
        weights=weights.get("MLA prolog", 0.0),
        activations=a * rows * (4 * c.hidden_size + 3 * c.q_lora_rank + 2 * latent + heads * c.qk_head_dim)
        + a * absorbed * heads * (c.qk_head_dim + latent)
        + 2 * shape.gathered * formats.cache.packed_width() * formats.cache.latent.pool_dtype.itemsize,
    )
    if indexer == "full":
        stages |= _indexer_work(config, shape, weights, formats)
    chosen = shape.sparse.rows * c.index_topk
    pairs = shape.dense.pairs + chosen
    expanded = shape.mha.keys * heads * rank * (c.qk_nope_head_dim + value)
    stages["sparse flash attention"] = Work(
        2 * (pairs * heads * (latent + rank) + expanded + shape.mha.pairs * heads * (c.qk_head_dim + value)),
        latent_rows=formats.cache.latent.row_bytes * (chosen + shape.dense.keys + shape.mha.keys),
        activations=a * absorbed * heads * (latent + rank)
        + a * heads * (c.qk_head_dim + value) * (shape.mha.rows + 2 * shape.mha.keys),
    )
    out = 2 * rows * heads * value * c.hidden_size
    stages["MLA epilog"] = Work(
        2 * absorbed * heads * rank * value + out,
        out * formats.narrow_linear,
        weights=weights.get("MLA epilog", 0.0),
        activations=a * (absorbed * heads * rank + rows * (2 * heads * value + 5 * c.hidden_size)),
    )
    return stages


def _indexer_work(config: ModelConfig, shape: Shape, weights: dict[str, float], formats: Formats) -> Stages:
    c, a, rows, sparse = config, formats.itemsize, shape.rows, shape.sparse
    heads, dim, key = c.index_n_heads, c.index_head_dim, formats.cache.index_key
    assert key is not None
    linear = 2 * (rows * c.hidden_size * dim + sparse.rows * c.q_lora_rank * heads * dim)
    products = 2 * sparse.pairs * heads * dim
    # Without sparse rows only the keys are computed.
    queries = bool(sparse.rows)
    return {
        "indexer prolog": Work(
            linear + 2 * sparse.rows * c.hidden_size * heads,
            linear * formats.narrow_linear,
            weights=weights.get("indexer prolog", 0.0) if queries else weights.get("index keys", 0.0),
            activations=a * (rows * (c.hidden_size + 2 * dim) + sparse.rows * (c.q_lora_rank + 3 * heads * dim)),
        ),
        "lightning indexer": Work(
            products + 2 * sparse.pairs * heads,
            products * formats.cache.fp8,
            index_keys=key.row_bytes * sparse.keys,
            # Scores are written once and read once; positions are int32.
            activations=2 * SCORE_BYTES * sparse.pairs + sparse.rows * (a * heads * dim + 4 * c.index_topk),
        ),
    }


def feed_forward_work(
    config: ModelConfig, kind: str, rows: int, served: Served, weights: dict[str, float], formats: Formats
) -> Stages:
    """A dense MLP, or gate, experts and shared expert with the dispatch between them.

    Args:
        kind: the layer's entry of ``config.mlp_layer_types``.
        weights: bytes by stage; "MoE experts": bytes of one expert.
    """
    c, a = config, formats.itemsize

    def mlp(name: str, rows: float, inner: int, narrow: bool, touched: float = 1.0) -> Work:
        flops = 6 * rows * c.hidden_size * inner
        moved = a * rows * (2 * c.hidden_size + 4 * inner)
        return Work(flops, flops * narrow, weights=weights.get(name, 0.0) * touched, activations=moved)

    if kind == "dense":
        return {"dense MLP": mlp("dense MLP", rows, c.intermediate_size, formats.narrow_linear)}
    inner, experts = c.moe_intermediate_size, c.n_routed_experts
    return {
        "MoE gate": Work(
            2 * rows * c.hidden_size * experts,
            weights=weights.get("MoE gate", 0.0),
            activations=rows * (a * c.hidden_size + 8 * experts),
        ),
        "MoE experts": mlp("MoE experts", served.pairs, inner, formats.narrow_experts, served.experts),
        "MoE shared": mlp("MoE shared", rows, c.n_shared_experts * inner, formats.narrow_linear),
        "MoE combine": Work(activations=3 * a * rows * c.hidden_size),
    }
