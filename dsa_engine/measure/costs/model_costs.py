"""Operations and bytes of a rank: of a forward pass, of a decode step with its drafts, and of a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dsa_engine.engine.batch import StepPlan
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.request import Chunk, Request
from dsa_engine.kernels.cache_format import CacheFormat
from dsa_engine.measure.costs.weights import WeightBytes
from dsa_engine.measure.costs.work import (
    Attended,
    Formats,
    Served,
    Shape,
    Stages,
    Work,
    add,
    attention_work,
    feed_forward_work,
    times,
)
from dsa_engine.measure.emulation.mesh import EmulatedMesh
from dsa_engine.model.config import ModelConfig
from dsa_engine.model.quantization_config import QuantizationConfig
from dsa_engine.quantization import Unquantized
from dsa_engine.sampling_params import SamplingParams


class Decode(NamedTuple):
    """A decode step of a rank."""

    requests: int  # of this rank
    everybodys: int  # of all ranks
    context: int  # tokens that a request's last row sees
    drafts: int = 0  # verified in the step, and made behind it


class ModelCosts:
    """What one rank's forward passes cost.

    Args:
        config: the model.
        weights: of the rank.
        formats: of caches and activations.
        balanced: experts are dealt out in turn, as to emulated ranks; else each token chooses for itself.
    """

    def __init__(self, config: ModelConfig, weights: WeightBytes, formats: Formats, balanced: bool = False):
        self.config, self.weights, self.formats, self.balanced = config, weights, formats, balanced

    @classmethod
    def of(cls, engine: Engine) -> ModelCosts:
        """Of the rank that an engine is."""
        config, mesh, dtype = engine.config, engine.mesh, engine.dtype
        weights = WeightBytes.of(engine.model)
        formats = formats_of(config, engine.cache.format, dtype.itemsize, config.quantization)
        if isinstance(engine.model.runtime.weights, Unquantized):
            formats = formats._replace(narrow_linear=False, narrow_experts=False)
        dealt_out = isinstance(mesh, EmulatedMesh) and mesh.world_size > 1 and not mesh.config.expert_loads
        return cls(config, weights, formats, balanced=dealt_out)

    def served(self, tokens: int) -> Served:
        """By the rank's experts, where all ranks together have ``tokens`` rows."""
        c = self.config
        return Served.evenly(tokens, c.num_experts_per_tok, self.weights.held, c.n_routed_experts, self.balanced)

    def forward(self, shape: Shape, served: Served) -> Stages:
        """All layers, the embedding of the rows and the logits of those that want them."""
        c, a = self.config, self.formats.itemsize
        parts: list[Stages] = []
        kinds = list(zip(c.mlp_layer_types, c.indexer_types, strict=True))[: c.num_hidden_layers]
        for kind in dict.fromkeys(kinds):
            parts.append(times(self.layer(*kind, shape, served), kinds.count(kind)))
        embedding = Work(weights=a * shape.rows * c.hidden_size, activations=a * shape.rows * c.hidden_size)
        return add({"embedding": embedding}, *parts, self.head(shape.logits))

    def layer(self, mlp: str, indexer: str, shape: Shape, served: Served) -> Stages:
        weights = self.weights.layers[(mlp, indexer)]
        if not shape.rows:  # the rank only serves others
            weights = {"MoE experts": weights.get("MoE experts", 0.0)}
        return add(
            attention_work(self.config, indexer, shape, weights, self.formats),
            feed_forward_work(self.config, mlp, shape.rows, served, weights, self.formats),
        )

    def head(self, rows: int) -> Stages:
        c = self.config
        moved = rows * (self.formats.itemsize * c.hidden_size + 8 * c.vocab_size)
        flops = 2 * rows * c.hidden_size * c.vocab_size
        return {"LM head": Work(flops, weights=self.weights.head if rows else 0.0, activations=moved)}

    def module(self, shape: Shape, served: Served) -> Stages:
        """A pass of the MTP module, and the logits of its drafts."""
        c, a = self.config, self.formats.itemsize
        joined = Work(
            4 * shape.rows * c.hidden_size**2,
            weights=self.weights.module,
            activations=6 * a * shape.rows * c.hidden_size,
        )
        embedding = Work(weights=a * shape.rows * c.hidden_size)
        layer = self.layer("sparse", "full" if c.has_indexer else "none", shape, served)
        return add({"embedding": embedding, "MLA prolog": joined}, layer, self.head(shape.logits))

    def decode(self, step: Decode) -> Stages:
        """A decode step: every request has a row for its last token and one for each draft; then the drafts' passes."""
        rows = 1 + step.drafts
        stages = self.forward(
            _decode_shape(self.config, step.requests, step.context, rows), self.served(step.everybodys * rows)
        )
        if not step.drafts:
            return stages
        own = _decode_shape(self.config, step.requests, step.context, rows, logits=step.requests)
        alone = _decode_shape(self.config, step.requests, step.context, 1)
        return add(
            stages,
            self.module(own, self.served(step.everybodys * rows)),
            times(self.module(alone, self.served(step.everybodys)), step.drafts - 1),
        )

    def prefill(self, steps: Sequence[StepPlan], rank: int, drafts: int = 0) -> Stages:
        """The steps of a prefill, on one rank; with an MTP module also its passes over the same rows."""
        parts: list[Stages] = []
        for step in steps:
            shape, served = Shape.of(step.ranks[rank]), self.served(sum(plan.rows for plan in step.ranks))
            parts.append(self.forward(shape, served))
            if drafts:
                parts.append(self.module(shape, served))
        return add(*parts)


def formats_of(config: ModelConfig, cache: CacheFormat, itemsize: int, stored: QuantizationConfig | None) -> Formats:
    """How numbers are stored where weights are kept as ``stored`` (None: in plain numbers), and which products have
    8-bit inputs."""
    names = ("model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight")
    schemes = [stored.scheme_of(name) if stored else None for name in names]
    linear, experts = (scheme is not None and scheme.activation_bits is not None for scheme in schemes)
    return Formats(cache, itemsize, linear, experts)


def prefill_plans(config: ModelConfig, tokens: int, cp_size: int, chunk: int) -> list[StepPlan]:
    """How a prompt's prefill is divided over the ranks of a context-parallel group.

    Args:
        chunk: most tokens of a rank in a step.
    """
    request, most = Request(-1, [0] * tokens, SamplingParams()), chunk * cp_size
    chunks = [Chunk(request, first, min(most, tokens - first), range(cp_size)) for first in range(0, tokens, most)]
    return [StepPlan.of([one], cp_size, config, "head_tail") for one in chunks]


def _decode_shape(config: ModelConfig, requests: int, context: int, rows: int, logits: int | None = None) -> Shape:
    """``requests`` of one length, each with so many rows at its end."""
    one = Chunk(Request(-1, [0] * context, SamplingParams()), context - rows, rows, range(1), rows)
    (plan,) = StepPlan.of([one], 1, config, "head_tail").ranks
    alone = Shape.of(plan)
    mha, dense, sparse = (Attended(*(n * requests for n in form)) for form in (alone.mha, alone.dense, alone.sparse))
    return Shape(mha, dense, sparse, requests * rows if logits is None else logits)
