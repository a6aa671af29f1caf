"""The best deployment for a load: every cut and format that the model and the device have, predicted and compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dsa_engine.config.model import ModelConfig
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.measure.planner.deployment import CACHES, DISPATCHES, WEIGHTS, Deployment, Placed
from dsa_engine.measure.planner.devices import Device
from dsa_engine.measure.planner.efficiency import Efficiencies
from dsa_engine.measure.planner.plan import DRAFTS, CannotCut, Load, NothingFits, Plan
from dsa_engine.measure.planner.predict import DecodeStep, Prefill, predict_decode, predict_prefill

CHUNKS = (2048, 4096, 8192, 16384)
MOST_REQUESTS = 512  # of a rank, in a decode step


class Planner:
    """Plans for one model and device.

    Args:
        fixed: options that are not searched but given, such as ``{"tp_size": 8}``, by the names of
            :class:`Deployment`.
    """

    def __init__(self, config: ModelConfig, device: Device, reached: Efficiencies, fixed: dict[str, Any] | None = None):
        self.config, self.device, self.reached, self.fixed = config, device, reached, fixed or {}
        self._placed = lru_cache(maxsize=4096)(lambda how: Placed(config, device, how))
        self._steps: dict[tuple[Deployment, int, Load], DecodeStep] = {}
        self._lacking: tuple[float, Deployment] | None = None
        for name in ("cp_size", "tp_size", "chunk"):
            if self.fixed.get(name, 1) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be above 0, not {self.fixed[name]}")
        drafts = self.fixed.get("drafts", 0)
        if drafts not in DRAFTS:
            raise ValueError(f"--drafts must be one of {DRAFTS}, not {drafts}")
        if drafts and not config.num_nextn_predict_layers:
            raise ValueError(f"--drafts {drafts}: the model has no MTP module to make them")

    def best(self, load: Load, split: bool = False) -> Plan:
        """The plan with the highest rate of those that keep to the load; where none does, the one that misses least.

        Raises:
            NothingFits: not one request has room.
            CannotCut: no instance divides the devices.
        """
        if load.longest > self.config.max_position_embeddings:
            raise ValueError(
                f"{load.input_len} + {load.output_len} tokens exceed the model's {self.config.max_position_embeddings} "
                "positions; shorten them, or raise max_position_embeddings with --hf-overrides"
            )
        self._lacking = None
        plans = list(self._split(load) if split else self._together(load))
        if not plans:
            if self._lacking is None:
                given = ", ".join(f"{name} {value}" for name, value in self.fixed.items()) or "nothing fixed"
                parts = "two instances or more" if split else "instances"
                raise CannotCut(
                    f"{load.devices} devices cannot be cut into {parts} with {given}: an instance has all ranks, or a "
                    f"half, a quarter, …, at most {self.config.n_routed_experts}, and sizes must divide it"
                )
            raise NothingFits(self._lacking[1], self._lacking[0])
        met = [plan for plan in plans if plan.misses(load) <= 0]
        if met:
            return max(met, key=lambda plan: (plan.tokens_per_s, -plan.devices, -plan.ttft, -plan.tpot))
        return min(plans, key=lambda plan: plan.misses(load))

    def remedy(self, load: Load) -> int | None:
        """The fewest devices of 2, 4 and 8 times as many that meet the load together; None: none of these does."""
        for factor in (2, 4, 8):
            more = replace(load, devices=load.devices * factor)
            try:
                if self.best(more).misses(more) <= 0:
                    return more.devices
            except NothingFits:
                continue
        return None

    def _together(self, load: Load) -> Iterator[Plan]:
        """All instances prefill and decode, as the engine does."""
        for ranks in self._sizes(load.devices):
            count = load.devices // ranks
            for base in self._formats(ranks):
                for prefill in self._prefills(base, load):
                    for how in self._decodes(base):
                        yield from self._shared(prefill, how, load, count)

    def _shared(self, prefill: Prefill, how: Deployment, load: Load, count: int) -> Iterator[Plan]:
        """A prompt's prefill keeps all of its ranks from decoding: it adds to every token's time."""
        wait = 1 / prefill.prompts_per_s / load.output_len  # of a token, for the prefill of one request
        for requests in self._batches(how, load, count, wait, reserved=load.input_len):
            step = self._step(how, requests, load)
            tpot = step.tpot + requests * wait
            limit = "prefill" if requests * wait > step.tpot else "decode"
            yield Plan(False, prefill, step, count, count, tpot, count * requests / tpot, limit)

    def _split(self, load: Load) -> Iterator[Plan]:
        """Some devices prefill, the others decode."""
        prefills = {ranks: self._best_prefill(ranks, load) for ranks in self._sizes(load.devices)}
        for decoding in self._sizes(load.devices):
            for base in self._formats(decoding):
                for how in self._decodes(base):
                    for count in self._counts(decoding, load):
                        for requests in self._batches(how, load, count or 1):
                            step = self._step(how, requests, load)
                            yield from self._matched(prefills, step, load, count)

    def _counts(self, decoding: int, load: Load) -> list[int | None]:
        """Of decode instances that may share the requests that were asked for; None: as many as are kept busy."""
        if load.requests is None:
            return [None]
        most = load.devices // decoding
        return [1 << i for i in range(most.bit_length()) if 1 << i <= load.requests]

    def _matched(
        self, prefills: dict[int, Prefill | None], step: DecodeStep, load: Load, given: int | None
    ) -> Iterator[Plan]:
        """As many instances of each as the devices allow, near the ratio in which both are busy, or ``given`` ones to
        decode."""
        per_instance = step.tokens_per_s
        for ranks, prefill in prefills.items():
            if prefill is None:
                continue
            most = (load.devices - ranks) // step.how.ranks
            fed = prefill.prompts_per_s * load.output_len  # tokens/s that one prefill instance can start
            ideal = load.devices / (ranks * per_instance / fed + step.how.ranks)
            for decodes in {given} if given else {max(1, int(ideal)), int(ideal) + 1}:
                if decodes > most:
                    continue
                count = (load.devices - decodes * step.how.ranks) // ranks
                rate = min(count * fed, decodes * per_instance)
                limit = "prefill" if count * fed < decodes * per_instance else "decode"
                yield Plan(True, prefill, step, count, decodes, step.tpot, rate, limit)

    def _sizes(self, devices: int) -> list[int]:
        """Ranks of an instance: the whole, and parts that halve it; at most one for each routed expert."""
        sizes = [devices]
        while sizes[-1] % 2 == 0:
            sizes.append(sizes[-1] // 2)
        return [size for size in sizes if size <= self.config.n_routed_experts]

    def _formats(self, ranks: int) -> Iterator[Deployment]:
        for weights in self._choices("weights", self._weights()):
            for cache in self._choices("cache", CACHES if self.config.has_indexer else CACHES[:1]):
                for tp in self._choices("tp_size", (1, 8)):
                    if ranks % tp == 0:
                        yield Deployment(ranks, tp_size=tp, weights=weights, cache=cache)

    def _weights(self) -> list[str]:
        """Formats that the device multiplies; 4-bit ones are expanded within the product."""
        return [w for w in WEIGHTS if w in ("bfloat16", "int4-experts") or w in self.device.narrow]

    def _choices(self, name: str, possible: Any) -> Any:
        return (self.fixed[name],) if name in self.fixed else possible

    def _prefills(self, base: Deployment, load: Load) -> list[Prefill]:
        """Those that fit, of each context-parallel size the fastest; only those that keep to TTFT, if any do."""
        fastest = []
        for cp in self._choices("cp_size", [n for n in self._sizes(base.ranks) if base.ranks % n == 0]):
            if base.ranks % cp:
                continue
            fitting = []
            whole = cdiv(load.input_len, cp)
            for chunk in self._choices("chunk", sorted({min(n, whole) for n in CHUNKS})):
                for dispatch in self._choices("moe_dispatch", DISPATCHES):
                    how = replace(base, cp_size=cp, chunk=chunk, dispatch=dispatch)
                    one = predict_prefill(self._placed(how), self.reached, load.input_len)
                    if one.room >= 0:
                        fitting.append(one)
                    else:
                        self._note(how, one.room)
            if fitting:
                fastest.append(min(fitting, key=lambda one: one.ttft))
        quick = [one for one in fastest if load.ttft is None or one.ttft <= load.ttft]
        return quick or fastest

    def _best_prefill(self, ranks: int, load: Load) -> Prefill | None:
        found = [one for base in self._formats(ranks) for one in self._prefills(base, load)]
        quick = [one for one in found if load.ttft is None or one.ttft <= load.ttft]
        if quick:
            return max(quick, key=lambda one: one.prompts_per_s)
        return min(found, key=lambda one: one.ttft, default=None)

    def _decodes(self, base: Deployment) -> Iterator[Deployment]:
        most = max(DRAFTS) if self.config.num_nextn_predict_layers else 0
        for drafts in self._choices("drafts", [n for n in DRAFTS if n <= most]):
            for dispatch in self._choices("decode_dispatch", DISPATCHES):
                yield replace(base, drafts=drafts, dispatch=dispatch)

    def _batches(self, how: Deployment, load: Load, count: int, wait: float = 0.0, reserved: int = 0) -> list[int]:
        """Requests of an instance that are worth a look. The rate rises with them: as many as memory or TPOT allow.

        Args:
            count: instances that share the load's requests.
            wait: seconds that each request adds to a token's time beside the decode steps.
            reserved: tokens of a prompt that is prefilled meanwhile.
        """
        most = self._most_requests(how, load, reserved)
        if load.requests is not None and most:
            return [min(cdiv(load.requests, count), most)]
        if load.tpot is None or most < 2:
            return [most] if most else []
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            within = self._step(how, middle, load).tpot + middle * wait <= load.tpot
            low, high = (middle, high) if within else (low, middle - 1)
        return [low]

    def _most_requests(self, how: Deployment, load: Load, reserved: int) -> int:
        """That memory has room for, of an instance."""
        placed = self._placed(how)
        held, kept = load.longest * placed.token_bytes, reserved * placed.token_bytes
        room = placed.cache_room(1 + how.drafts) - kept
        most = min(int(max(0.0, room) // held), MOST_REQUESTS)
        while most and placed.cache_room(most * (1 + how.drafts)) - kept < most * held:
            most -= 1
        if not most:
            self._note(how, room - held)
        return most * how.ranks

    def _step(self, how: Deployment, requests: int, load: Load) -> DecodeStep:
        key = (how, requests, load)
        if key not in self._steps:
            per_step = load.tokens_per_step(how.drafts)
            self._steps[key] = predict_decode(
                self._placed(how), self.reached, requests, load.context, per_step, load.longest
            )
        return self._steps[key]

    def _note(self, how: Deployment, room: float) -> None:
        if self._lacking is None or -room < self._lacking[0]:
            self._lacking = (-room, how)
