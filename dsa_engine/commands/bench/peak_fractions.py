"""Counted work beside measured times: the fraction of the device's measured peak rates that a run has reached."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dsa_engine.commands.bench.result import Result
from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.ceilings import Ceilings
from dsa_engine.measure.costs.model_costs import Decode, ModelCosts, Stages, Work, prefill_plans_of, times
from dsa_engine.measure.report import format_table
from dsa_engine.system.sizes import format_bytes

_READ = ("weights", "index_keys", "latent_rows")


class PeakFractions:
    """Fractions for one engine's runs. Create it on every rank at the same time, as it measures the ceilings.

    A step's bytes are the minimum that it has to read (`measure/costs/`), on the rank with the most requests: weights
    in their format, those of the experts that the batch is expected to choose; index keys; selected latent rows. They
    are compared with a copy, which reads and writes. Operations are compared with the peak of the run's
    dtype (`ceilings.py`), whatever the format of the weights.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._costs = ModelCosts.of(engine)
        self.ceilings = Ceilings.measure(engine.mesh.device, engine.dtype)

    def decode(self, result: Result) -> dict[str, Any]:
        """Work of a decode step in the middle of the output; empty if none was measured."""
        if not result.itl:
            return {}
        self.ceilings = self.ceilings.raised(self._engine.mesh.device)  # in turn with the runs
        drafts, ranks = result.num_speculative_tokens, self._engine.mesh.world_size
        context = result.input_len + max(1, result.output_len // 2) + drafts
        step = Decode(cdiv(result.batch_size, ranks), result.batch_size, context, drafts)
        stages, seconds = self._costs.decode(step), statistics.median(result.itl)
        work = total(stages)
        rate = work.bytes_read / seconds
        return {
            "decode_step": {
                "bytes_read": {name: round(getattr(work, name)) for name in _READ},
                "flops": round(work.flops),
                "gb_per_s": rate / 1e9,
                "share_of_copy": rate / self.ceilings.bytes_per_s,
                "stages": {name: asdict(one) for name, one in stages.items()},
            }
        }

    def prefill(self, input_len: int, seconds: float, batch_size: int = 1, drafts: int = 0) -> dict[str, Any]:
        """Work of the prefills of ``batch_size`` prompts, which take ``seconds`` together."""
        self.ceilings = self.ceilings.raised(self._engine.mesh.device)
        mesh, plans = self._engine.mesh, prefill_plans_of(self._engine, input_len)
        prompts = cdiv(batch_size, mesh.world_size // mesh.cp_size)
        # A rank's experts serve the prompts of all groups.
        each = [self._costs.prefill(plans, rank, drafts, batch_size / prompts) for rank in mesh.cp_ranks(0)]
        busiest = times(max(each, key=lambda stages: total(stages).flops), prompts)
        flops = total(busiest).flops
        rate = flops / seconds
        return {
            "prefill_work": {
                "flops": round(flops),
                "tflops_per_s": rate / 1e12,
                "share_of_peak": rate / self.ceilings.flops_per_s,
                "share_of_matmul": rate / (self.ceilings.matmul_flops_per_s or self.ceilings.flops_per_s),
                "stages": {name: asdict(one) for name, one in busiest.items()},
            }
        }

    def of(self, result: Result) -> dict[str, Any]:
        """Work of prefill and decode, where they were measured."""
        work, drafts = {}, result.num_speculative_tokens
        if result.prefill:
            work = self.prefill(result.input_len, statistics.median(result.prefill), result.batch_size, drafts)
        return work | self.decode(result)


def total(stages: Stages) -> Work:
    return sum(stages.values(), Work())


def print_peak_fractions(sizes: Sequence[str], listed: Sequence[dict[str, Any]], ceilings: Ceilings) -> None:
    """Prints the results of :class:`PeakFractions` as tables, a row per size, where they were measured."""
    decodes, prefills = [], []
    for size, one in zip(sizes, listed, strict=True):
        if step := one.get("decode_step"):
            read = [format_bytes(step["bytes_read"][name]) for name in _READ]
            decodes.append((size, *read, f"{step['gb_per_s']:.3g}", f"{step['share_of_copy']:.1%}"))
        if work := one.get("prefill_work"):
            rate = f"{work['tflops_per_s']:.3g}", f"{work['share_of_peak']:.1%}"
            prefills.append((size, f"{work['flops'] / 1e12:.3g}", *rate))
    copy = f"of a copy ({ceilings.bytes_per_s / 1e9:.3g} GB/s)"
    peak = f"of the peak ({ceilings.flops_per_s / 1e12:.3g} TFLOP/s)"
    if decodes:
        header = ("a decode step reads", "weights", "index keys", "latent rows", "GB/s", copy)
        print("\n" + format_table(header, decodes))
    if prefills:
        print("\n" + format_table(("prefill", "TFLOP a rank", "TFLOP/s", peak), prefills))
