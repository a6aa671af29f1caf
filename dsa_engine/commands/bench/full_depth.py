"""Latencies of the whole model, scaled from a run with fewer layers; always reported as scaled, not measured."""

from __future__ import annotations

import statistics
from typing import Any

from dsa_engine.commands.bench.result import Result
from dsa_engine.config.model import ModelConfig
from dsa_engine.llm import LLM
from dsa_engine.measure.stage_timer import mean_stages

# The stages of a decoder layer of each kind; all others are outside the layers.
_EVERY_LAYER = ("MLA prolog", "sparse flash attention", "MLA epilog", "communication")
_SELECTING_LAYER = ("indexer prolog", "lightning indexer")
_DENSE_LAYER = ("dense MLP",)
_MOE_LAYER = ("MoE gate", "MoE dispatch", "MoE experts", "MoE shared", "MoE combine")

# Keys of config.json that define the layers: overrides of these apply to the run, not to the whole model.
_LAYER_KEYS = {
    *("num_hidden_layers", "first_k_dense_replace", "mlp_layer_types"),
    *("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
}


def depth_factors(measured: ModelConfig, full: ModelConfig) -> dict[str, float]:
    """Factor of every stage of a layer: the number of layers with that stage in ``full`` over the number in the run."""
    factors: dict[str, float] = {}
    for stages, what, count in (
        (_EVERY_LAYER, "decoder layer", lambda c: c.num_hidden_layers),
        (_SELECTING_LAYER, "layer with an indexer", lambda c: c.indexer_types.count("full")),
        (_DENSE_LAYER, "dense layer", lambda c: c.mlp_layer_types.count("dense")),
        (_MOE_LAYER, "MoE layer", lambda c: c.mlp_layer_types.count("sparse")),
    ):
        here, there = count(measured), count(full)
        if there and not here:
            raise ValueError(f"no {what} was measured and the whole model has {there}; measure more layers")
        factors |= dict.fromkeys(stages, there / here if here else 1.0)
    return factors


class FullDepth:
    """The scaling. ``changed``: keys of config.json, other than those of layers, that the run has changed."""

    def __init__(self, measured: ModelConfig, full: ModelConfig, **changed: Any):
        self.measured = measured.num_hidden_layers
        self.layers = full.num_hidden_layers
        self.changed = "".join(f", {key} {value}" for key, value in changed.items())
        self.factors = depth_factors(measured, full)

    @classmethod
    def of(cls, llm: LLM) -> FullDepth | None:
        """The scaling of an engine's run; None if it has as many layers as config.json says."""
        engine = llm.engine
        overrides = {key: v for key, v in engine.options.hf_overrides.items() if key not in _LAYER_KEYS}
        full = ModelConfig.from_pretrained(llm.folder, overrides)
        same = full.num_hidden_layers == engine.config.num_hidden_layers
        return None if same else cls(engine.config, full, **overrides)

    def scale(self, result: Result) -> dict[str, float]:
        """Milliseconds of TTFT and TPOT at full depth: each stage's part of the median times the stage's factor."""
        scaled = {}
        for metric, phase, seconds in (("ttft", "prefill", result.ttft), ("tpot", "decode", result.tpot)):
            if seconds:
                stages = mean_stages(result.stages[phase])
                growth = sum(s * self.factors.get(name, 1.0) for name, s in stages.items()) / sum(stages.values())
                scaled[metric] = statistics.median(seconds) * growth * 1e3
        return scaled

    def to_json(self, result: Result) -> dict[str, Any]:
        times = {f"{metric}_ms": ms for metric, ms in self.scale(result).items()}
        about = {"num_hidden_layers": self.layers, "measured_layers": self.measured}
        return {"scaled_to_full_depth": about | times}

    def line(self, result: Result, metric: str) -> str:
        depth = f"with all {self.layers} layers instead of {self.measured}{self.changed}"
        ms = self.scale(result).get(metric, float("nan"))
        by = ", by the stages of watched steps, which are eager" if metric == "tpot" else ""
        return f"SCALED, not measured: {result.size} {depth}: {metric.upper()} {ms:,.1f} ms{by}"
