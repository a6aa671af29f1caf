"""Search for the best deployment: predicts and compares a grid of cuts, formats and loads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from dsa_engine.commands.planner.demand import CACHES, DRAFTS, Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.devices import Device
from dsa_engine.commands.planner.predict import OWN, Kernels, Predicted, predict_decode, predict_prefill
from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.system.progress import progress_bar
from dsa_engine.weights.formats.choose import quantization_name

CHUNKS = (2048, 4096, 8192, 16384)
LOADS = sorted(n << i for n in (2, 3) for i in range(16))  # requests of an instance, beside 1
MAX_REQUESTS = 512  # a rank, in a decode step
NEAR = 0.1  # part of the highest rate that a plan may lack if its latency is lower


@dataclass(frozen=True)
class Plan:
    """A way to use the devices: instances of the model that prefill and decode."""

    instances: int
    prefill: Predicted  # of one instance, as decode, on the same ranks
    decode: Predicted
    waited: float  # seconds per output token in which a request's ranks prefill others

    @property
    def ttft(self) -> float:
        return self.prefill.seconds

    @property
    def tpot(self) -> float:
        """Seconds per token, including prefills of other requests between decode steps."""
        return self.decode.seconds + self.waited

    @property
    def requests(self) -> int:
        return self.decode.requests * self.instances

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second and device."""
        return self.decode.requests / self.tpot / self.decode.how.ranks

    def misses(self, demand: Demand) -> float:
        """The largest relative excess over the demand; 0 if it is met."""
        asked = ((self.ttft, demand.ttft), (self.tpot, demand.tpot), (demand.requests or 0, self.requests))
        return round(max(0.0, *(value / limit - 1 for value, limit in asked if limit)), 6)


class NothingFits(ValueError):
    """No deployment has room for one request, or none divides the devices."""


class Planner:
    """Makes plans for one model, device and demand, by the times of ``kernels``.

    ``fixed``: settings that are given, not searched, such as ``{"tp_size": 8}``, by the names of :class:`Deployment`.
    """

    def __init__(
        self, config: ModelConfig, device: Device, demand: Demand, fixed: dict[str, Any] | None = None,
        kernels: Kernels = OWN,
    ):  # fmt: skip
        self.config, self.device, self.demand, self.fixed = config, device, demand, fixed or {}
        self.kernels = kernels
        self.placed = lru_cache(maxsize=4096)(lambda how: Placed(config, device, how))
        self._lacking: tuple[float, Deployment] | None = None
        if self.fixed.get("drafts") and not config.num_nextn_predict_layers:
            raise ValueError(f"--drafts {self.fixed['drafts']}: the model has no MTP module to make them")
        self.hot_rows, least = self.fixed.get("hot_rows", 0), config.index_topk * (1 + self.fixed.get("drafts", 0))
        if self.hot_rows and (not config.has_indexer or self.hot_rows < least):
            raise ValueError(
                f"--hot-rows {self.hot_rows}: "
                + (f"a step may select {least} rows" if config.has_indexer else "the model selects no rows")
            )
        stored, is_released = quantization_name(config.quantization) or "bfloat16", config.weight_block_size is not None
        self.stored = ("fp8", "bfloat16") if is_released else (stored,)  # formats that take no conversion
        weights = self.fixed.get("weights", stored)
        if weights not in self.stored and config.quantization is not None and not is_released:
            raise ValueError(
                f"--weights {weights}: the checkpoint's are {stored}, which cannot be converted; give the model that "
                "it was made from, or leave --weights out"
            )
        if demand.longest > config.max_position_embeddings:
            raise ValueError(
                f"--input-len {demand.input_len} and --output-len {demand.output_len} exceed the model's "
                f"{config.max_position_embeddings} positions; shorten them, or raise max_position_embeddings with "
                "--hf-overrides"
            )

    def best(self) -> Plan:
        """The plan with the lowest latency of a request, of those that meet the demand with a rate within :data:`NEAR`
        of the highest; if none meets the demand, the one that misses it least."""
        demand, plans = self.demand, list(self._plans())
        if not plans:
            raise NothingFits(self._reason())
        met = [plan for plan in plans if plan.misses(demand) <= 0]
        if not met:
            return min(plans, key=lambda plan: plan.misses(demand))
        highest = max(plan.tokens_per_s for plan in met)
        near = [plan for plan in met if plan.tokens_per_s >= (1 - NEAR) * highest]
        return min(near, key=lambda plan: plan.ttft + demand.output_len * plan.tpot)

    def again(self, plan: Plan, kernels: Kernels) -> Plan:
        """The same plan with other kernels."""
        prefill = predict_prefill(self.placed(plan.prefill.how), self.demand.input_len, kernels)
        decode = predict_decode(self.placed(plan.decode.how), plan.decode.requests, self.demand, kernels)
        return self._plan(prefill, decode)

    def _reason(self) -> str:
        if self._lacking is None:
            given = ", ".join(f"{name} {value}" for name, value in self.fixed.items()) or "nothing fixed"
            return (
                f"--devices {self.demand.devices} cannot be cut into instances with {given}: an instance has all of "
                f"them, a half, a quarter, …, at most {self.config.n_routed_experts}, and sizes must divide it"
            )
        room, how = self._lacking
        return (
            f"a request of {self.demand.longest:,} tokens lacks {-room / 2**30:.1f} GiB on each of {how.ranks} ranks, "
            f"with {how.weights} weights and {how.cache} caches; take more or larger devices, shorter requests, or "
            "fewer bits (--weights, --cache)"
        )

    def _plans(self) -> Iterator[Plan]:
        drafts = self._choices("drafts", DRAFTS if self.config.num_nextn_predict_layers else (0,))
        if self.hot_rows:  # as many as select no more
            drafts = [number for number in drafts if self.hot_rows >= (1 + number) * self.config.index_topk]
        bases = list(self._formats())
        with progress_bar(len(bases), "deployments", "planning") as bar:
            for base in bases:
                loads = [load for number in drafts for load in self._loads(replace(base, drafts=number))]
                for prefill in self._prefills(base):
                    yield from (self._plan(prefill, load) for load in loads)
                bar.update()

    def _plan(self, prefill: Predicted, decode: Predicted) -> Plan:
        """A prompt's prefill keeps all ranks of its instance from decoding, and adds to every token's time."""
        waited = decode.requests * prefill.seconds / prefill.requests / self.demand.output_len
        return Plan(self.demand.devices // decode.how.ranks, prefill, decode, waited)

    def _sizes(self) -> list[int]:
        """Numbers of ranks of an instance: all devices, a half, a quarter, …; at most one rank per routed expert."""
        sizes = [self.demand.devices]
        while sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return [size for size in sizes if size <= self.config.n_routed_experts]

    def _formats(self) -> Iterator[Deployment]:
        """Weights are as the checkpoint has them, or expanded, and FP8 caches go with FP8 weights: what changes numbers
        further is given. The device multiplies the format; 4-bit ones are expanded within the product."""
        multiplied = [w for w in self.stored if w in ("bfloat16", "int4-experts", *self.device.narrow)]
        caches = self._choices("cache", CACHES if self.config.has_indexer else ("bfloat16",))
        settings = product(
            self._sizes(), self._choices("weights", multiplied), caches, self._choices("tp_size", (1, 8))
        )
        for ranks, weights, cache, tp_size in settings:
            if ranks % tp_size == 0 and ("cache" in self.fixed or cache == "bfloat16" or weights == "fp8"):
                how = Deployment(ranks, tp_size=tp_size, weights=weights, cache=cache, hot_rows=self.hot_rows)
                yield self._together(how)

    def _together(self, base: Deployment) -> Deployment:
        """With the smallest ``dcp_size`` with which a request fits: each rank more exchanges more in every layer."""
        sizes = [size for size in reversed(self._sizes()) if base.ranks % size == 0]
        sizes = [1, *(size for size in sizes if size > 1)]
        hows = [replace(base, dcp_size=size) for size in self._choices("dcp_size", sizes) if base.ranks % size == 0]
        chunk = self._choices("chunk", CHUNKS)[0]
        for how in hows:
            placed = self.placed(how)
            if placed.cache_room(chunk, placed.dispatch(chunk)) >= placed.prefilled(self.demand.input_len):
                return how
        return hows[-1] if hows else base

    def _choices(self, name: str, possible: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else possible

    def _prefills(self, base: Deployment) -> list[Predicted]:
        """The fastest prefill that fits for each context-parallel size; only those that meet TTFT, if any does."""
        tokens, fastest = self.demand.input_len, []
        for cp in self._choices("cp_size", self._sizes()):
            if base.ranks % cp or cp % base.dcp_size:
                continue
            chunks = self._choices("chunk", sorted({min(chunk, cdiv(tokens, cp)) for chunk in CHUNKS}))
            hows = [replace(base, cp_size=cp, chunk=chunk) for chunk in chunks]
            predicted = [predict_prefill(self.placed(how), tokens, self.kernels) for how in hows]
            fitting = [one for one in predicted if self._fits(one.how, one.room)]
            if fitting:
                fastest.append(min(fitting, key=lambda one: one.seconds))
        quick = [one for one in fastest if self.demand.ttft is None or one.seconds <= self.demand.ttft]
        return quick or fastest

    def _loads(self, how: Deployment) -> list[Predicted]:
        """Decode steps with a growing number of requests of an instance, or with as many as are asked for and fit. From
        the second request on, a rank keeps room for a prompt that is prefilled while others decode."""
        asked, fitting = self.demand.requests, []
        limit = cdiv(asked, self.demand.devices // how.ranks) if asked else MAX_REQUESTS * how.ranks
        for requests in sorted({1, limit, *(load for load in LOADS if load < limit)}):
            step = predict_decode(self.placed(how), requests, self.demand, self.kernels)
            prompt = self.placed(how).prefilled(self.demand.input_len) if requests > 1 else 0
            if not self._fits(how, step.room - prompt):
                break
            fitting.append(step)
        return fitting[-1:] if asked else fitting

    def _fits(self, how: Deployment, room: float) -> bool:
        if room < 0 and (self._lacking is None or room > self._lacking[0]):
            self._lacking = room, how
        return room >= 0
