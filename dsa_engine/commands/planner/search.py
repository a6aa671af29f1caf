"""Search for the best deployment: predicts and compares every cut and format of the model and the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dsa_engine.commands.planner.choices import CACHES, DISPATCHES, DRAFTS, WEIGHTS
from dsa_engine.commands.planner.handover import predict_handover
from dsa_engine.commands.planner.plan import NEAR, CannotCut, Demand, DeploymentPlan, NothingFits
from dsa_engine.commands.planner.prediction.deployment import Deployment, Placed
from dsa_engine.commands.planner.prediction.devices import Device
from dsa_engine.commands.planner.prediction.efficiency import Efficiencies
from dsa_engine.commands.planner.prediction.predict import predict_decode, predict_prefill
from dsa_engine.commands.planner.prediction.predicted import DecodeStep, Prefill
from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.runtime.integers import cdiv

CHUNKS = (2048, 4096, 8192, 16384)
MAX_REQUESTS = 512  # maximum of a rank in a decode step


class Planner:
    """Makes plans for one model and device.

    Args:
        fixed: options that are given, not searched, such as ``{"tp_size": 8}``, by the names of
            :class:`Deployment`.
    """

    def __init__(self, config: ModelConfig, device: Device, reached: Efficiencies, fixed: dict[str, Any] | None = None):
        self.config, self.device, self.reached, self.fixed = config, device, reached, fixed or {}
        self._placed = lru_cache(maxsize=4096)(lambda how: Placed(config, device, how))
        self._steps: dict[tuple[Deployment, int, Demand], DecodeStep] = {}
        self._lacking: tuple[float, Deployment] | None = None
        for name in ("cp_size", "tp_size", "chunk"):
            if self.fixed.get(name, 1) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {self.fixed[name]}")
        if self.fixed.get("redundant_experts", 0) < 0 or not self.fixed.get("imbalance", 1.0) >= 1:
            raise ValueError("--redundant-experts must be at least 0, and --imbalance at least 1")
        drafts = self.fixed.get("drafts", 0)
        if drafts not in DRAFTS:
            raise ValueError(f"--drafts must be one of {DRAFTS}, not {drafts}")
        if drafts and not config.num_nextn_predict_layers:
            raise ValueError(f"--drafts {drafts}: the model has no MTP module to make them")

    def best(self, demand: Demand, split: bool = False) -> DeploymentPlan:
        """The plan with the lowest latency of a request, of those that meet the demand with a rate within :data:`NEAR`
        of the highest; if none meets the demand, the one that misses it least.

        Raises:
            NothingFits: there is no room for a single request.
            CannotCut: no instance divides the devices.
        """
        if demand.longest > self.config.max_position_embeddings:
            raise ValueError(
                f"{demand.input_len} + {demand.output_len} tokens exceed the model's "
                f"{self.config.max_position_embeddings} positions; shorten them, or raise max_position_embeddings with "
                "--hf-overrides"
            )
        self._lacking = None
        plans = list(self._split(demand) if split else self._together(demand))
        if not plans:
            if self._lacking is None:
                given = ", ".join(f"{name} {value}" for name, value in self.fixed.items()) or "nothing fixed"
                parts = "two instances or more" if split else "instances"
                raise CannotCut(
                    f"{demand.devices} devices cannot be cut into {parts} with {given}: an instance has all ranks, or "
                    f"a half, a quarter, …, at most {self.config.n_routed_experts}, and sizes must divide it"
                )
            raise NothingFits(self._lacking[1], self._lacking[0])
        met = [plan for plan in plans if plan.misses(demand) <= 0]
        if met:
            highest = max(met, key=lambda plan: (plan.tokens_per_s, -plan.latency, -plan.devices))
            near = [plan for plan in met if plan.tokens_per_s >= (1 - NEAR) * highest.tokens_per_s]
            chosen = min(near, key=lambda plan: (plan.latency, plan.devices, -plan.tokens_per_s))
            return chosen if chosen.latency == highest.latency else replace(chosen, highest_rate=highest)
        return min(plans, key=lambda plan: plan.misses(demand))

    def remedy(self, demand: Demand) -> int | None:
        """The smallest of 2, 4 and 8 times as many devices that meets the demand without a split; None: none does."""
        for factor in (2, 4, 8):
            more = replace(demand, devices=demand.devices * factor)
            try:
                if self.best(more).misses(more) <= 0:
                    return more.devices
            except NothingFits:
                continue
        return None

    def _together(self, demand: Demand) -> Iterator[DeploymentPlan]:
        """Plans in which all instances prefill and decode, as the engine does."""
        for ranks in self._sizes(demand.devices):
            count = demand.devices // ranks
            for base in self._formats(ranks):
                for prefill in self._prefills(base, demand):
                    for how in self._decodes(base):
                        yield from self._shared(prefill, how, demand, count)

    def _shared(self, prefill: Prefill, how: Deployment, demand: Demand, count: int) -> Iterator[DeploymentPlan]:
        """Plans of shared ranks. A prompt's prefill keeps all of its ranks from decoding and adds to every token's
        time."""
        wait = 1 / prefill.prompts_per_s / demand.output_len  # per token, for the prefill of one request
        for requests in self._batches(how, demand, count, wait, reserved=demand.input_len):
            step = self._step(how, requests, demand)
            tpot = step.tpot + requests * wait
            limit = "prefill" if requests * wait > step.tpot else "decode"
            rate, latency = count * requests / tpot, prefill.ttft + demand.output_len * tpot
            yield DeploymentPlan(False, prefill, step, count, count, tpot, rate, limit, latency)

    def _split(self, demand: Demand) -> Iterator[DeploymentPlan]:
        """Plans in which some devices prefill and the others decode. Rows travel as they are stored, so both have the
        same formats."""
        prefills = {
            (weights, cache): [
                one
                for ranks in self._sizes(demand.devices)
                for one in self._best_prefills(ranks, demand, weights, cache)
            ]
            for weights, cache in dict.fromkeys((base.weights, base.cache) for base in self._formats(demand.devices))
        }
        for decoding in self._sizes(demand.devices):
            for base in self._formats(decoding):
                fitting = prefills[base.weights, base.cache]
                for how in self._decodes(base):
                    for count in self._counts(decoding, demand):
                        for requests in self._batches(how, demand, count or 1):
                            step = self._step(how, requests, demand)
                            yield from self._matched(fitting, step, demand, count)

    def _counts(self, decoding: int, demand: Demand) -> list[int | None]:
        """Numbers of decode instances for the demanded requests; None: as many instances as are kept busy."""
        if demand.requests is None:
            return [None]
        max_instances = demand.devices // decoding
        return [1 << i for i in range(max_instances.bit_length()) if 1 << i <= demand.requests]

    def _matched(
        self, prefills: Sequence[Prefill], step: DecodeStep, demand: Demand, given: int | None
    ) -> Iterator[DeploymentPlan]:
        """Plans with as many instances of each kind as the devices allow, near the ratio that keeps both busy, or with
        ``given`` decode instances."""
        per_instance = step.tokens_per_s
        for prefill in prefills:
            ranks = prefill.how.ranks
            handover = predict_handover(self._placed(step.how), prefill, demand.input_len)
            landed = step.how.ranks * demand.output_len / handover.seconds  # tokens/s whose rows one instance can take
            max_decodes = (demand.devices - ranks) // step.how.ranks
            fed = prefill.prompts_per_s * demand.output_len  # tokens/s that one prefill instance can start
            ideal = demand.devices / (ranks * per_instance / fed + step.how.ranks)
            for decodes in {given} if given else {max(1, int(ideal)), int(ideal) + 1}:
                if decodes > max_decodes:
                    continue
                count = (demand.devices - decodes * step.how.ranks) // ranks
                rates = {"decode": decodes * per_instance, "prefill": count * fed, "handover": decodes * landed}
                limit = min(rates, key=lambda name: rates[name])
                latency = prefill.ttft + handover.exposed + demand.output_len * step.tpot
                yield DeploymentPlan(
                    True, prefill, step, count, decodes, step.tpot, rates[limit], limit, latency, handover=handover
                )

    def _sizes(self, devices: int) -> list[int]:
        """Numbers of ranks of an instance: all devices, a half, a quarter, …; at most one rank per routed expert."""
        sizes = [devices]
        while sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return [size for size in sizes if size <= self.config.n_routed_experts]

    def _formats(self, ranks: int) -> Iterator[Deployment]:
        for weights in self._choices("weights", self._weights()):
            for cache in self._choices("cache", CACHES if self.config.has_indexer else CACHES[:1]):
                for tp in self._choices("tp_size", (1, 8)):
                    if ranks % tp == 0:
                        yield Deployment(
                            ranks,
                            tp_size=tp,
                            weights=weights,
                            cache=cache,
                            dispatch_dtype=self.fixed.get("dispatch_dtype", "fp8"),
                            combine_dtype=self.fixed.get("combine_dtype", "bfloat16"),
                            prefetch_weights=self.fixed.get("prefetch_weights", False),
                            beside_shared=True,
                            beside_queries=True,
                            redundant=self.fixed.get("redundant_experts", 0),
                            imbalance=self.fixed.get("imbalance", 1.0),
                        )

    def _weights(self) -> list[str]:
        """Weight formats that the device multiplies; 4-bit ones are expanded within the product."""
        return [w for w in WEIGHTS if w in ("bfloat16", "int4-experts") or w in self.device.narrow]

    def _choices(self, name: str, possible: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else possible

    def _prefills(self, base: Deployment, demand: Demand) -> list[Prefill]:
        """The fastest prefill that fits for each context-parallel size; only those that meet TTFT, if any does."""
        fastest = []
        for cp in self._choices("cp_size", [n for n in self._sizes(base.ranks) if base.ranks % n == 0]):
            if base.ranks % cp:
                continue
            fitting = []
            whole = cdiv(demand.input_len, cp)
            for chunk in self._choices("chunk", sorted({min(n, whole) for n in CHUNKS})):
                for dispatch, two_batches in self._exchanges("moe_dispatch", base.ranks):
                    how = replace(base, cp_size=cp, chunk=chunk, dispatch=dispatch, two_batches=two_batches)
                    one = predict_prefill(self._placed(how), self.reached, demand.input_len)
                    if one.room >= 0:
                        fitting.append(one)
                    else:
                        self._note(how, one.room)
            if fitting:
                fastest.append(min(fitting, key=lambda one: one.ttft))
        quick = [one for one in fastest if demand.ttft is None or one.ttft <= demand.ttft]
        return quick or fastest

    def _best_prefills(self, ranks: int, demand: Demand, weights: str, cache: str) -> list[Prefill]:
        """The prefill with the highest rate, and the fastest one of those that come near it, with these formats."""
        bases = [base for base in self._formats(ranks) if (base.weights, base.cache) == (weights, cache)]
        prefills = [one for base in bases for one in self._prefills(base, demand)]
        quick = [one for one in prefills if demand.ttft is None or one.ttft <= demand.ttft]
        if not quick:
            return [min(prefills, key=lambda one: one.ttft)] if prefills else []
        highest = max(quick, key=lambda one: one.prompts_per_s)
        near = [one for one in quick if one.prompts_per_s >= (1 - NEAR) * highest.prompts_per_s]
        return [highest, min(near, key=lambda one: one.ttft)]

    def _decodes(self, base: Deployment) -> Iterator[Deployment]:
        max_drafts = max(DRAFTS) if self.config.num_nextn_predict_layers else 0
        for drafts in self._choices("drafts", [n for n in DRAFTS if n <= max_drafts]):
            for dispatch, two_batches in self._exchanges("decode_dispatch", base.ranks):
                yield replace(base, drafts=drafts, dispatch=dispatch, two_batches=two_batches)

    def _exchanges(self, name: str, ranks: int) -> Iterator[tuple[str, bool]]:
        """Dispatches, each in one batch and in two."""
        machine = self.device.machine_size
        possible = [one for one in DISPATCHES if one != "by_machine" or ranks > machine]
        if ranks == 1:
            possible = possible[:1]
        for dispatch in self._choices(name, possible):
            for two_batches in self._choices("two_batches", (False, True) if ranks > 1 else (False,)):
                yield dispatch, two_batches

    def _batches(self, how: Deployment, demand: Demand, count: int, wait: float = 0.0, reserved: int = 0) -> list[int]:
        """Numbers of requests of an instance to consider. The rate rises with them, so as many as memory or TPOT allow.

        Args:
            count: number of instances that divide the demanded requests.
            wait: seconds that each request adds to a token's time, apart from the decode steps.
            reserved: tokens of a prompt that is prefilled at the same time.
        """
        max_requests = self._max_requests(how, demand, reserved)
        if demand.requests is not None and max_requests:
            return [min(cdiv(demand.requests, count), max_requests)]
        if demand.tpot is None or max_requests < 2:
            return [max_requests] if max_requests else []
        low, high = 1, max_requests
        while low < high:
            middle = (low + high + 1) // 2
            within = self._step(how, middle, demand).tpot + middle * wait <= demand.tpot
            low, high = (middle, high) if within else (low, middle - 1)
        return [low]

    def _max_requests(self, how: Deployment, demand: Demand, reserved: int) -> int:
        """Number of requests of an instance for which there is memory: beside ``reserved`` tokens, or one alone."""
        placed = self._placed(how)
        held, reserved_bytes = demand.longest * placed.token_bytes, reserved * placed.token_bytes
        alone = placed.cache_room(1 + how.drafts)
        max_requests = min(int(max(0.0, alone - reserved_bytes) // held), MAX_REQUESTS)
        while (
            max_requests and placed.cache_room(max_requests * (1 + how.drafts)) - reserved_bytes < max_requests * held
        ):
            max_requests -= 1
        if not max_requests and alone >= held:
            return 1
        if not max_requests:
            self._note(how, alone - held)
        return max_requests * how.ranks

    def _step(self, how: Deployment, requests: int, demand: Demand) -> DecodeStep:
        key = (how, requests, demand)
        if key not in self._steps:
            per_step = demand.tokens_per_step(how.drafts)
            self._steps[key] = predict_decode(
                self._placed(how), self.reached, requests, demand.context, per_step, demand.longest
            )
        return self._steps[key]

    def _note(self, how: Deployment, room: float) -> None:
        if self._lacking is None or -room < self._lacking[0]:
            self._lacking = (-room, how)
