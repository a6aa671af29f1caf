"""Search for the best deployment: predicts and compares cuts and formats of the model on the devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dsa_engine.commands.planner.demand import CACHES, DRAFTS, WEIGHTS, Demand
from dsa_engine.commands.planner.deployment import Deployment, Placed
from dsa_engine.commands.planner.devices import Device
from dsa_engine.commands.planner.predict import Predicted, predict_decode, predict_prefill
from dsa_engine.commands.planner.roofline import OWN, Kernels
from dsa_engine.config.model import ModelConfig
from dsa_engine.engine.requests.capacity import pages_for
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.options import EngineOptions

CHUNKS = (2048, 4096, 8192, 16384)
MAX_REQUESTS = 512  # a rank, in a decode step
NEAR = 0.1  # part of the highest rate that a plan may lack if its latency is lower


@dataclass(frozen=True)
class Plan:
    """A way to use the devices.

    Attributes:
        split: whether prefill and decode have separate devices, as with ``ParallelConfig.prefill_ranks``.
        prefill, decode: one instance of each; without ``split`` both are the same ranks.
        prefill_instances, decode_instances: number of each; equal without ``split``.
        tpot: seconds per token, including prefills of other requests between decode steps.
        tokens_per_s: output tokens of all devices together.
        limit: the bound of the rate: "prefill", "decode" or "KV transfer".
        transfer: seconds of a request's KV transfer after its prefill; 0 without ``split``.
    """

    split: bool
    prefill: Predicted
    decode: Predicted
    prefill_instances: int
    decode_instances: int
    tpot: float
    tokens_per_s: float
    limit: str
    transfer: float = 0.0

    @property
    def ttft(self) -> float:
        return self.prefill.seconds

    @property
    def requests(self) -> int:
        return self.decode.requests * self.decode_instances

    @property
    def devices(self) -> int:
        used = self.decode_instances * self.decode.how.ranks
        return used + self.prefill_instances * self.prefill.how.ranks * self.split

    def latency(self, demand: Demand) -> float:
        """Seconds of one request, from its prompt to its last token, without queueing."""
        return self.ttft + self.transfer + demand.output_len * self.tpot

    def misses(self, demand: Demand) -> float:
        """The largest relative excess over the demand; 0 if it is met."""
        asked = ((self.ttft, demand.ttft), (self.tpot, demand.tpot), (demand.requests or 0, self.requests))
        return max(0.0, *(value / limit - 1 for value, limit in asked if limit))


class NothingFits(ValueError):
    """No deployment has room for one request, or none divides the devices."""


class Planner:
    """Makes plans for one model and device.

    Args:
        fixed: settings that are given, not searched, such as ``{"tp_size": 8}``, by the names of :class:`Deployment`.
        kernels: what the stages reach.
    """

    def __init__(
        self, config: ModelConfig, device: Device, fixed: dict[str, Any] | None = None, kernels: Kernels = OWN
    ):
        self.config, self.device, self.fixed, self.kernels = config, device, fixed or {}, kernels
        self._placed = lru_cache(maxsize=4096)(lambda how: Placed(config, device, how))
        self._lacking: tuple[float, Deployment] | None = None
        if self.fixed.get("drafts") and not config.num_nextn_predict_layers:
            raise ValueError(f"--drafts {self.fixed['drafts']}: the model has no MTP module to make them")

    def best(self, demand: Demand, split: bool = False) -> Plan:
        """The plan with the lowest latency of a request, of those that meet the demand with a rate within :data:`NEAR`
        of the highest; if none meets the demand, the one that misses it least.

        Raises:
            NothingFits: there is no room for a single request, or no instance divides the devices.
        """
        if demand.longest > self.config.max_position_embeddings:
            raise ValueError(
                f"--input-len {demand.input_len} and --output-len {demand.output_len} exceed the model's "
                f"{self.config.max_position_embeddings} positions; shorten them, or raise max_position_embeddings with "
                "--hf-overrides"
            )
        self._lacking = None
        plans = list(self._split(demand) if split else self._together(demand))
        if not plans:
            raise NothingFits(self._reason(demand))
        met = [plan for plan in plans if plan.misses(demand) <= 0]
        if not met:
            return min(plans, key=lambda plan: plan.misses(demand))
        highest = max(plan.tokens_per_s for plan in met)
        near = [plan for plan in met if plan.tokens_per_s >= (1 - NEAR) * highest]
        return min(near, key=lambda plan: (plan.latency(demand), plan.devices, -plan.tokens_per_s))

    def again(self, plan: Plan, demand: Demand, kernels: Kernels) -> Plan:
        """The same plan with other kernels."""
        prefill = predict_prefill(self._placed(plan.prefill.how), demand.input_len, kernels)
        decode = self._step(plan.decode.how, plan.decode.requests, demand, kernels)
        make = self._apart if plan.split else self._shared
        return make(prefill, decode, demand, plan.prefill_instances, plan.decode_instances)

    def weight_bytes(self, how: Deployment) -> float:
        """Bytes of the weights on a rank, as ``dsa-engine info`` counts them."""
        return self._placed(how).weight_bytes

    def _reason(self, demand: Demand) -> str:
        if self._lacking is None:
            given = ", ".join(f"{name} {value}" for name, value in self.fixed.items()) or "nothing fixed"
            return (
                f"--devices {demand.devices} cannot be cut into instances with {given}: an instance has all ranks, or "
                f"a half, a quarter, …, at most {self.config.n_routed_experts}, and sizes must divide it"
            )
        room, how = self._lacking
        return (
            f"a request of {demand.longest:,} tokens lacks {-room / 2**30:.1f} GiB on each of {how.ranks} ranks, with "
            f"{how.weights} weights and {how.cache} caches; take more devices, ones with more memory, or shorter "
            "requests"
        )

    def _together(self, demand: Demand) -> Iterator[Plan]:
        """Plans in which all instances prefill and decode."""
        for ranks in self._sizes(demand.devices):
            count = demand.devices // ranks
            for base in self._formats(ranks):
                for prefill in self._prefills(base, demand):
                    wait = prefill.seconds / prefill.requests / demand.output_len
                    for how in self._decodes(base):
                        for requests in self._requests(how, demand, count, wait, demand.input_len):
                            yield self._shared(prefill, self._step(how, requests, demand), demand, count, count)

    def _split(self, demand: Demand) -> Iterator[Plan]:
        """Plans in which some devices prefill and the others decode, in the same formats, as rows travel as stored."""
        sizes = [size for size in self._sizes(demand.devices) if size < demand.devices]
        for filling in sizes:
            for base in self._formats(filling):
                for prefill in self._prefills(base, demand):
                    for decoding in sizes:
                        if decoding % base.tp_size:
                            continue
                        for how in self._decodes(replace(base, ranks=decoding)):
                            yield from self._matched(prefill, how, demand)

    def _matched(self, prefill: Predicted, how: Deployment, demand: Demand) -> Iterator[Plan]:
        """As many instances of both as keep each other busy."""
        filling = prefill.how.ranks
        for requests in self._requests(how, demand, 1)[:1]:
            step = self._step(how, requests, demand)
            rate = step.per_s / (prefill.per_s * demand.output_len)  # prefill instances for a decode instance
            ideal = int(demand.devices / (filling * rate + how.ranks))
            for decodes in {max(1, ideal), ideal + 1}:
                prefills = (demand.devices - decodes * how.ranks) // filling
                if prefills < 1:
                    continue
                if demand.requests:
                    step = self._step(how, min(cdiv(demand.requests, decodes), requests), demand)
                yield self._apart(prefill, step, demand, prefills, decodes)

    def _shared(self, prefill: Predicted, step: Predicted, demand: Demand, count: int, _: int) -> Plan:
        """A prompt's prefill keeps all of its ranks from decoding, and adds to every token's time."""
        waited = step.requests * prefill.seconds / prefill.requests / demand.output_len
        tpot, limit = step.seconds + waited, "prefill" if waited > step.seconds else "decode"
        return Plan(False, prefill, step, count, count, tpot, count * step.requests / tpot, limit)

    def _apart(self, prefill: Predicted, step: Predicted, demand: Demand, prefills: int, decodes: int) -> Plan:
        """Pages leave layer by layer under the prefill of the next chunk: the last layer's rows of the last chunk
        remain, or what a slow link has not carried yet."""
        placed, how = self._placed(step.how), prefill.how
        pages = pages_for(demand.input_len, EngineOptions.page_size) * EngineOptions.page_size
        seconds = pages * placed.token_bytes / (placed.links.between.bandwidth_gb_s * 1e9)
        steps = cdiv(demand.input_len, how.chunk * how.cp_size)
        after = max(seconds / steps / self.config.num_hidden_layers, seconds - prefill.seconds * (steps - 1) / steps)
        rates = {
            "decode": decodes * step.per_s,
            "prefill": prefills * prefill.per_s * demand.output_len,
            "KV transfer": decodes * step.how.ranks * demand.output_len / seconds,
        }
        limit = min(rates, key=lambda name: rates[name])
        return Plan(True, prefill, step, prefills, decodes, step.seconds, rates[limit], limit, after)

    def _sizes(self, devices: int) -> list[int]:
        """Numbers of ranks of an instance: all devices, a half, a quarter, …; at most one rank per routed expert."""
        sizes = [devices]
        while sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return [size for size in sizes if size <= self.config.n_routed_experts]

    def _formats(self, ranks: int) -> Iterator[Deployment]:
        """Weight formats are those that the device multiplies; 4-bit ones are expanded within the product."""
        multiplied = [w for w in WEIGHTS if w in ("bfloat16", "int4-experts") or w in self.device.narrow]
        for weights in self._choices("weights", multiplied):
            for cache in self._choices("cache", CACHES if self.config.has_indexer else ("bfloat16",)):
                for tp in self._choices("tp_size", (1, 8)):
                    if ranks % tp == 0:
                        yield Deployment(ranks, tp_size=tp, weights=weights, cache=cache)

    def _choices(self, name: str, possible: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else possible

    def _prefills(self, base: Deployment, demand: Demand) -> list[Predicted]:
        """The fastest prefill that fits for each context-parallel size; only those that meet TTFT, if any does."""
        fastest = []
        for cp in self._choices("cp_size", self._sizes(base.ranks)):
            if base.ranks % cp:
                continue
            whole = cdiv(demand.input_len, cp)
            predicted = [
                predict_prefill(self._placed(replace(base, cp_size=cp, chunk=chunk)), demand.input_len, self.kernels)
                for chunk in self._choices("chunk", sorted({min(chunk, whole) for chunk in CHUNKS}))
            ]
            fitting = [one for one in predicted if self._fits(one.how, one.room)]
            if fitting:
                fastest.append(min(fitting, key=lambda one: one.seconds))
        quick = [one for one in fastest if demand.ttft is None or one.seconds <= demand.ttft]
        return quick or fastest

    def _decodes(self, base: Deployment) -> Iterator[Deployment]:
        possible = DRAFTS if self.config.num_nextn_predict_layers else (0,)
        for drafts in self._choices("drafts", possible):
            yield replace(base, drafts=drafts)

    def _requests(self, how: Deployment, demand: Demand, count: int, wait: float = 0.0, reserved: int = 0) -> list[int]:
        """The number of requests of an instance: as many as are asked for, or as memory and TPOT allow; none if not one
        fits.

        Args:
            count: number of instances that divide the requests that are asked for.
            wait: seconds that each request adds to a token's time, beside the decode steps.
            reserved: tokens of a prompt that is prefilled at the same time.
        """
        limit = self._max_requests(how, demand, reserved)
        if demand.requests is not None:
            limit = min(limit, cdiv(demand.requests, count))
        if demand.tpot is None or limit < 2 or demand.requests is not None:
            return [limit] if limit else []
        low, high = 1, limit
        while low < high:
            middle = (low + high + 1) // 2
            within = self._step(how, middle, demand).seconds + middle * wait <= demand.tpot
            low, high = (middle, high) if within else (low, middle - 1)
        return [low]

    def _max_requests(self, how: Deployment, demand: Demand, reserved: int) -> int:
        """Number of requests of an instance for which there is memory: beside ``reserved`` tokens, or one alone."""
        placed = self._placed(how)
        each = demand.longest * placed.token_bytes
        alone = placed.cache_room(1 + how.drafts)
        limit = min(int(max(0.0, alone - reserved * placed.token_bytes) // each), MAX_REQUESTS)
        while limit and placed.cache_room(limit * (1 + how.drafts)) < limit * each + reserved * placed.token_bytes:
            limit -= 1
        if limit:
            return limit * how.ranks
        return int(self._fits(how, alone - each))

    def _step(self, how: Deployment, requests: int, demand: Demand, kernels: Kernels | None = None) -> Predicted:
        per_step = demand.tokens_per_step(how.drafts)
        return predict_decode(
            self._placed(how), requests, demand.context, per_step, demand.longest, kernels or self.kernels
        )

    def _fits(self, how: Deployment, room: float) -> bool:
        if room < 0 and (self._lacking is None or room > self._lacking[0]):
            self._lacking = room, how
        return room >= 0
