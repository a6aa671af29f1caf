"""Handovers of a plan, and of runs of ``scripts/bench_disaggregated.py`` beside what is predicted for them."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dsa_engine.commands.planner.prediction.deployment import Placed
from dsa_engine.commands.planner.prediction.predicted import Prefill
from dsa_engine.config.model import DTYPES
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.costs.handover import Handover, handover_of, seconds_of_steps
from dsa_engine.measure.report import format_table
from dsa_engine.model.kv_cache import cache_bytes_per_token, cache_dtype, cache_format
from dsa_engine.model_folder import model_config
from dsa_engine.options import EngineOptions


def predict_handover(
    placed: Placed, prefill: Prefill, tokens: int, page_size: int = EngineOptions.page_size
) -> Handover:
    """The handover of a prompt of ``tokens`` tokens to a rank on another machine.

    Args:
        placed: the deployment that decodes; its cache rows are those that travel.
        prefill: the prompt's prefill, with caches of the same format.
    """
    rate = placed.links.between.bandwidth_gb_s * 1e9
    layers = placed.config.num_hidden_layers + bool(placed.how.drafts)
    step = prefill.how.chunk * prefill.how.cp_size
    return handover_of(tokens, page_size, placed.token_bytes, layers, step, rate, prefill.ttft)


@dataclass(frozen=True)
class CheckedHandovers:
    """All handovers of a run of ``scripts/bench_disaggregated.py``, beside what is predicted from its prompts, from the
    rate of its link and from its times to first token.

    Attributes:
        predicted: their sums.
        nbytes: bytes as counted.
        predicted_after, after: seconds from the ends of the steps that send pages until these have left, as predicted
            and as measured.
    """

    predicted: Handover
    nbytes: int
    predicted_after: float
    after: float

    @classmethod
    def read(cls, path: str) -> CheckedHandovers:
        """Predicts the handovers of a run from its JSON.

        Raises:
            ValueError: the file is something else.
        """
        try:
            run = json.loads(Path(path).read_text(encoding="utf-8"))
            sent, options = run["transfer"], run["options_in_force"]
            prompts, ranks, rate = sent["prompts"], sent["prefill_ranks"], sent["link_bytes_per_s"]
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no JSON of scripts/bench_disaggregated.py with --prefill-ranks ({error!r}); --check reads "
                "such files of --measured, and measures here without them"
            ) from error
        config = model_config(str(options["model"]), options["hf_overrides"])
        cached = config.with_mtp(1) if options["speculative_config"] else config
        stored = cache_format(config, cache_dtype(options["kv_cache_dtype"], DTYPES[run["dtype"]]))
        step = options["max_num_batched_tokens"] * (options["parallel"]["cp_size"] or ranks)
        layers = len(cached.indexer_types)
        of_run = options["page_size"], cache_bytes_per_token(cached, stored), layers, step, rate
        ways, after = list[Handover](), 0.0
        for load, prompt in prompts.items():
            tokens, ttft = prompt["input_len"], run["results"]["apart"][load]["median_ttft_ms"] / 1e3
            way, steps = handover_of(tokens, *of_run, ttft), cdiv(tokens, step)
            of_steps = seconds_of_steps(tokens, step, way.seconds)
            one = way.seconds if steps == 1 else sum(max(s / layers, s - ttft / steps) for s in of_steps)
            ways, after = ways + [way] * prompt["requests"], after + one * prompt["requests"]
        total = (sum(getattr(way, field.name) for way in ways) for field in fields(Handover))
        return cls(Handover(*total), sent["bytes_sent"], after, sent["exposed_ms"] / 1e3 / ranks)

    @property
    def verdict(self) -> str:
        if self.nbytes == self.predicted.nbytes:
            return "the bytes are equal"
        return (
            f"the bytes DIFFER by {self.nbytes - self.predicted.nbytes:,}: requests that lost their pages are sent "
            "again, and pages that are cached are not sent"
        )

    def to_json(self) -> dict[str, Any]:
        predicted = self.predicted.to_json() | {"after_steps": self.predicted_after}
        measured = {"nbytes": self.nbytes, "after_steps": self.after}
        return {"predicted": predicted, "measured": measured, "verdict": self.verdict}

    def table(self) -> str:
        way, after, measured = self.predicted, 1e3 * self.predicted_after, 1e3 * self.after
        rows = [
            ("bytes", way.nbytes, self.nbytes, f"{way.nbytes / self.nbytes:.4g}" if self.nbytes else ""),
            ("ms on the link", way.seconds * 1e3, "", ""),
            ("ms after their steps", after, measured, f"{after / measured:.3g}" if measured else ""),
        ]
        return f"{format_table(('handovers', 'predicted', 'measured', 'ratio'), rows)}\nHandovers: {self.verdict}"
