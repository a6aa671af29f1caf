"""Operations and bytes of one rank: for a forward pass, a decode step with its drafts, and a prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from dsa_engine.config.model import ModelConfig
from dsa_engine.config.quantization import QuantizationConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Chunk, Request
from dsa_engine.engine.steps.plan import StepPlan
from dsa_engine.kernels.formats.cache_format import CacheFormat
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
from dsa_engine.quantization import Unquantized
from dsa_engine.sampling_params import SamplingParams


class Decode(NamedTuple):
    """A decode step of a rank."""

    requests: int  # requests of this rank
    world_requests: int  # requests of all ranks
    context: int  # tokens that a request's last row sees
    drafts: int = 0  # checked in the step; as many are drafted after it


class ModelCosts:
    """Work of one rank's forward passes.

    Args:
        weights: bytes of the rank's weights.
        formats: formats of caches and activations.
    """

    def __init__(self, config: ModelConfig, weights: WeightBytes, formats: Formats):
        self.config, self.weights, self.formats = config, weights, formats

    @classmethod
    def of(cls, engine: Engine) -> ModelCosts:
        """The costs of an engine's rank."""
        config, weights = engine.config, WeightBytes.of(engine.model)
        formats = formats_of(config, engine.cache.format, engine.dtype.itemsize, config.quantization)
        if isinstance(engine.model.runtime.weights, Unquantized):
            formats = formats._replace(narrow_linear=False, narrow_experts=False)
        return cls(config, weights, formats)

    def served(self, tokens: float) -> Served:
        """Work of the rank's experts when all ranks together have ``tokens`` rows."""
        c = self.config
        return Served.evenly(tokens, c.num_experts_per_tok, self.weights.held, c.n_routed_experts)

    def forward(self, shape: Shape, served: Served) -> Stages:
        """All layers, the embedding of the rows, and the logits of the rows that need them."""
        c, a = self.config, self.formats.itemsize
        parts: list[Stages] = []
        kinds = list(zip(c.mlp_layer_types, c.indexer_types, strict=True))[: c.num_hidden_layers]
        for kind in dict.fromkeys(kinds):
            parts.append(times(self.layer(*kind, shape, served), kinds.count(kind)))
        row = a * shape.rows * c.hidden_size
        # Outside of stages: the last norm, and the host's preparation of each row.
        outside = {
            "embedding": Work(weights=row, activations=row, passes=1),
            "other": Work(activations=4 * row, passes=1),
        }
        return add(outside, *parts, self.head(shape.logits))

    def layer(self, mlp: str, indexer: str, shape: Shape, served: Served) -> Stages:
        weights = self.weights.layers[(mlp, indexer)]
        if not shape.rows:  # the rank only computes experts for other ranks
            weights = {"MoE experts": weights.get("MoE experts", 0.0)}
        stages = attention_work(self.config, indexer, shape, weights, self.formats)
        stages |= feed_forward_work(self.config, mlp, shape.rows, served, weights, self.formats)
        if self.weights.held == self.config.n_routed_experts:
            stages.pop("MoE combine", None)  # a rank that holds all experts sends no results back
        return {name: replace(work, passes=1.0) for name, work in stages.items()}

    def head(self, rows: int) -> Stages:
        c = self.config
        moved = rows * (self.formats.itemsize * c.hidden_size + 8 * c.vocab_size)
        flops = 2 * rows * c.hidden_size * c.vocab_size
        return {"LM head": Work(flops, weights=self.weights.head, activations=moved, passes=1)} if rows else {}

    def module(self, shape: Shape, served: Served) -> Stages:
        """A pass of the MTP module, and the logits of its drafts."""
        c, a = self.config, self.formats.itemsize
        joined = Work(
            4 * shape.rows * c.hidden_size**2,
            weights=self.weights.module,
            activations=6 * a * shape.rows * c.hidden_size,
        )
        embedding = Work(weights=a * shape.rows * c.hidden_size, passes=1)
        layer = self.layer("sparse", "full" if c.has_indexer else "none", shape, served)
        return add({"embedding": embedding, "MLA prolog": joined}, layer, self.head(shape.logits))

    def decode(self, step: Decode) -> Stages:
        """A decode step: the pass that checks the drafts, then the passes that draft."""
        return add(self.verification(step), self.drafting(step))

    def verification(self, step: Decode) -> Stages:
        """The pass of the model: every request has a row for its last token and one for each draft."""
        rows = 1 + step.drafts
        return self.forward(
            _decode_shape(self.config, step.requests, step.context, rows), self.served(step.world_requests * rows)
        )

    def drafting(self, step: Decode) -> Stages:
        """The passes of the MTP module that draft; empty without drafts."""
        if not step.drafts:
            return {}
        rows = 1 + step.drafts
        own = _decode_shape(self.config, step.requests, step.context, rows, logits=step.requests)
        alone = _decode_shape(self.config, step.requests, step.context, 1)
        return add(
            self.module(own, self.served(step.world_requests * rows)),
            times(self.module(alone, self.served(step.world_requests)), step.drafts - 1),
        )

    def prefill(self, steps: Sequence[StepPlan], rank: int, drafts: int = 0, groups: float = 1) -> Stages:
        """The steps of a prefill, on one rank; with an MTP module also its passes over the same rows.

        ``groups`` context-parallel groups are assumed to do the same at the same time; the mean, if they do not
        divide evenly.
        """
        shapes = []
        for step in steps:
            rows = [plan.rows for plan in step.ranks if plan.rows]
            shapes.append(replace(Shape.of(step.ranks[rank]), gathered=sum(rows) if len(rows) > 1 else 0))
        served = [self.served(groups * sum(plan.rows for plan in step.ranks)) for step in steps]
        # Everything but the weights grows with the rows: one pass over all rows, with the weights read once per step.
        whole = (sum(shapes[1:], shapes[0]), Served(sum(s.pairs for s in served), sum(s.experts for s in served)))
        once = self.forward(*whole) if not drafts else add(self.forward(*whole), self.module(*whole))
        return {name: _in_steps(name, work, len(steps)) for name, work in once.items()}


def _in_steps(name: str, work: Work, steps: int) -> Work:
    """Experts and embedding are counted by what is chosen of them already, and the last step alone has logits."""
    if name == "LM head":
        return work
    weights = work.weights if name in ("MoE experts", "embedding") else work.weights * steps
    return replace(work, weights=weights, passes=work.passes * steps)


def formats_of(config: ModelConfig, cache: CacheFormat, itemsize: int, stored: QuantizationConfig | None) -> Formats:
    """Formats of numbers if weights are stored as ``stored`` (None: not quantised), and the products with 8-bit
    inputs."""
    names = ("model.layers.0.self_attn.q_b_proj.weight", "model.layers.0.mlp.experts.0.up_proj.weight")
    schemes = [stored.scheme_of(name) if stored else None for name in names]
    linear, experts = (scheme is not None and scheme.activation_bits is not None for scheme in schemes)
    return Formats(cache, itemsize, linear, experts)


def prefill_plans(config: ModelConfig, tokens: int, cp_size: int, chunk: int) -> list[StepPlan]:
    """Step plans of a prompt's prefill by one context-parallel group.

    Args:
        chunk: maximum number of tokens of a rank in a step.
    """
    return [StepPlan.of([one], cp_size, config) for one in _prefill_chunks(tokens, cp_size, chunk)]


def prefill_plans_of(engine: Engine, tokens: int) -> list[StepPlan]:
    """The same for an engine's own ranks, of which the first context-parallel group computes the prompt."""
    mesh, rows = engine.mesh, 1 + engine.runner.num_drafts
    chunks = _prefill_chunks(tokens, mesh.cp_size, engine.options.max_num_batched_tokens)
    return [StepPlan.of([one], mesh.world_size, engine.config, rows) for one in chunks]


def _prefill_chunks(tokens: int, cp_size: int, chunk: int) -> list[Chunk]:
    request, maximum = Request(-1, [0] * tokens, SamplingParams()), chunk * cp_size
    return [Chunk(request, first, min(maximum, tokens - first), range(cp_size)) for first in range(0, tokens, maximum)]


def _decode_shape(config: ModelConfig, requests: int, context: int, rows: int, logits: int | None = None) -> Shape:
    """``requests`` requests of one length, each with ``rows`` rows at its end."""
    alone = _one_request(config, context, rows)
    mha, dense, sparse = (Attended(*(n * requests for n in form)) for form in (alone.mha, alone.dense, alone.sparse))
    return Shape(mha, dense, sparse, requests * rows if logits is None else logits)


@lru_cache(maxsize=256)
def _one_request(config: ModelConfig, context: int, rows: int) -> Shape:
    one = Chunk(Request(-1, [0] * context, SamplingParams()), context - rows, rows, range(1), rows)
    (plan,) = StepPlan.of([one], 1, config).ranks
    return Shape.of(plan)
