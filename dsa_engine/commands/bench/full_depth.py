"""Latencies of the whole model, from runs of two depths with fewer layers; always reported as scaled, not measured."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsa_engine.commands.bench.result import Result
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.engine import Engine
from dsa_engine.llm import LLM

# Keys of config.json that define the layers: overrides of these apply to the run, not to the whole model.
_LAYER_KEYS = {
    *("num_hidden_layers", "first_k_dense_replace", "mlp_layer_types"),
    *("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"),
}


@contextmanager
def first_layers(engine: Engine, count: int) -> Iterator[None]:
    """The engine with its first ``count`` layers only; graphs are captured anew, and again afterwards."""
    model, layers = engine.model, engine.model.layers
    try:
        for some in (layers[:count], layers):
            if engine.graphs is not None:
                engine.graphs.close()
            model.layers = some
            if some is not layers:
                yield
    finally:
        model.layers = layers


class FullDepth:
    """The scaling: each layer that was not measured takes what the second half of the measured ones take, which is the
    difference of two runs. ``changed``: keys of config.json, other than those of layers, that the run has changed."""

    def __init__(self, measured: ModelConfig, full: ModelConfig, **changed: Any):
        self.measured, self.layers = measured.num_hidden_layers, full.num_hidden_layers
        self.fewer = (self.measured + 1) // 2
        self.changed = "".join(f", {key} {value}" for key, value in changed.items())
        usual = max(("dense", "sparse"), key=full.mlp_layer_types[: self.layers].count)
        if usual not in measured.mlp_layer_types[self.fewer : self.measured]:
            raise ValueError(
                f"of {self.measured} layers the second half, by which times are scaled to {self.layers}, has no "
                f"{usual} one; measure more layers"
            )

    @classmethod
    def of(cls, llm: LLM) -> FullDepth | None:
        """The scaling of an engine's run; None if it has as many layers as config.json says."""
        engine = llm.engine
        overrides = {key: v for key, v in engine.options.hf_overrides.items() if key not in _LAYER_KEYS}
        full = ModelConfig.from_pretrained(llm.folder, overrides)
        same = full.num_hidden_layers == engine.config.num_hidden_layers
        return None if same else cls(engine.config, full, **overrides)

    def to_json(self, result: Result, fewer: Result) -> dict[str, Any]:
        """Milliseconds of TTFT and TPOT at full depth, and with the fewer layers."""
        growth = (self.layers - self.measured) / (self.measured - self.fewer)
        scaled: dict[str, Any] = {"num_hidden_layers": self.layers, "measured_layers": self.measured}
        scaled["fewer_layers"] = self.fewer
        for metric in ("ttft", "tpot"):
            if getattr(result, metric) and getattr(fewer, metric):
                ms, less = (statistics.median(getattr(one, metric)) * 1e3 for one in (result, fewer))
                scaled |= {f"{metric}_ms": ms + (ms - less) * growth, f"fewer_{metric}_ms": less}
        return {"scaled_to_full_depth": scaled}

    def line(self, size: str, scaled: dict[str, Any], metric: str) -> str:
        depth = f"with all {self.layers} layers instead of {self.measured}{self.changed}"
        ms, less = (scaled.get(name, float("nan")) for name in (f"{metric}_ms", f"fewer_{metric}_ms"))
        by = f"by the difference to {self.fewer} layers, {less:,.2f} ms"
        return f"SCALED, not measured: {size} {depth}: {metric.upper()} {ms:,.1f} ms, {by}"
