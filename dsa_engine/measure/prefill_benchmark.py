"""Measurements that the scripts report: prefill, time to first token, time per output token."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any

import torch

from dsa_engine.engine.engine import Engine
from dsa_engine.engine.memory import peak_bytes, reset_peak
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.links import Links
from dsa_engine.measure.emulation.mesh import EmulatedMesh, follow_steps
from dsa_engine.measure.emulation.overlap_model import Communication, Pass, watched
from dsa_engine.measure.figures import Figure
from dsa_engine.measure.timed_generation import Generation, generate_batch, most_tokens


def random_prompt(engine: Engine, length: int, seed: int = 0) -> list[int]:
    """``length`` random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(engine.config.vocab_size) for _ in range(length)]


@dataclass(frozen=True)
class PrefillResult:
    """A prefill, measured. Lists have one value a rank; of an emulated run, that rank's alone."""

    input_len: int
    world_size: int
    seconds: list[float]  # of every repeat; of an emulated rank, its computation
    peak_memory_bytes: list[int]
    attention_pairs: list[int]  # query-key pairs under the causal mask
    imbalance: float  # most attention work of a rank over the average, of all ranks
    bytes_sent: list[int]  # payload put into collectives, per repeat
    stage_seconds: list[dict[str, float]]  # per repeat, averaged over the repeats
    logits: torch.Tensor  # float32 [vocab], after the last token; of an emulated rank they mean nothing
    communication: Communication | None = None  # modelled, of an emulated rank, per repeat

    @property
    def ttft(self) -> Figure:
        return Figure("ttft", self.seconds, self.input_len, self.world_size, self.communication)

    def to_json(self) -> dict[str, Any]:
        return {
            "input_len": self.input_len,
            **self.ttft.to_json("input_throughput"),
            "peak_memory_bytes": self.peak_memory_bytes,
            "attention_pairs": self.attention_pairs,
            "bytes_sent": self.bytes_sent,
            "imbalance": self.imbalance,
            "stage_ms": [_ms(rank) for rank in self.stage_seconds],
        }


def measure_prefill(
    engine: Engine, prompt: list[int], *, warmup: int = 1, repeat: int = 3, links: Links | None = None
) -> PrefillResult:
    """Prefills ``prompt`` ``warmup + repeat`` times; the same result on every rank.

    One context-parallel group computes it (all ranks, by default). A stage's time is what the main stream or thread
    spends in it: waits for what runs beside it are counted where they end. ``links`` are those of an emulated run.
    """
    mesh = engine.mesh
    follow_steps(engine)
    reset_peak(mesh.device)
    for _ in range(warmup):
        engine.prefill(prompt)
    seconds: list[float] = []
    passes: list[Pass] = []
    sent = 0
    for _ in range(repeat):
        _barrier(engine)
        sent -= sum(group.bytes_sent for group in mesh.groups)
        begin = time.perf_counter()
        with watched(engine) as watch:
            logits = engine.prefill(prompt)  # on the CPU: all device work is done
        seconds.append(time.perf_counter() - begin)
        sent += sum(group.bytes_sent for group in mesh.groups)
        passes.append(watch)
    seconds = [s - watch.emulation_seconds() for s, watch in zip(seconds, passes, strict=True)]
    stages = _mean([watch.stage_seconds() for watch in passes])
    communication = None
    if isinstance(mesh, EmulatedMesh):
        model = links or Links()
        communication = Communication.sum(watch.communication(model) for watch in passes).scaled(1 / repeat)
    pairs = [sum(step) for step in zip(*(p.attention_pairs() for p in engine.prefill_plans(len(prompt))), strict=True)]
    everybodys = from_all_ranks(engine, [float(peak_bytes(mesh.device)), sent / repeat, *stages.values(), *seconds])
    first = 2 + len(stages)
    return PrefillResult(
        input_len=len(prompt),
        world_size=mesh.world_size,
        seconds=[max(row[first + i] for row in everybodys) for i in range(repeat)],  # the slowest rank's
        peak_memory_bytes=[int(row[0]) for row in everybodys],
        attention_pairs=[pairs[mesh.rank]] if isinstance(mesh, EmulatedMesh) else pairs,
        imbalance=max(pairs) * len(pairs) / sum(pairs),
        bytes_sent=[int(row[1]) for row in everybodys],
        stage_seconds=[dict(zip(stages, row[2:first], strict=True)) for row in everybodys],
        logits=logits,
        communication=communication,
    )


@dataclass(frozen=True)
class LatencyResult:
    """Requests of one length, generated together. Times are in seconds; of an emulated rank, its computation.

    Stages have one dictionary a rank. They are taken in one more run, which is not timed.
    """

    input_len: int
    output_len: int
    batch_size: int
    ttft: Figure | None  # of every request and repeat; None where caches were filled
    prefill: Figure | None  # of every repeat: until the last request has its first token
    tpot: Figure | None  # of every repeat: per token after the first, while the whole batch decodes
    itl: Figure | None  # of every such step
    peak_memory_bytes: list[int]  # per rank
    prefill_stages: list[dict[str, float]]  # until every request has its first token
    decode_stages: list[dict[str, float]]  # per token after that; empty without

    def to_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {
            "input_len": self.input_len,
            "output_len": self.output_len,
            "batch_size": self.batch_size,
        }
        if self.ttft and self.prefill:
            result |= self.ttft.to_json() | self.prefill.to_json("input_throughput")
        else:
            result["cache"] = "filled with random rows"
        if self.tpot and self.itl:
            result |= self.tpot.to_json("output_throughput") | self.itl.to_json()
        stages = {"prefill": self.prefill_stages, "decode": self.decode_stages}
        stage_ms = {phase: [_ms(rank) for rank in ranks] for phase, ranks in stages.items() if ranks}
        return result | {"peak_memory_bytes": self.peak_memory_bytes, "stage_ms": stage_ms}


def check_latency(engine: Engine, input_len: int, output_len: int, batch_size: int, fill_cache: bool) -> None:
    """Raises what :func:`measure_latency` would raise for this length and batch, and runs nothing.

    Raises:
        ValueError, CapacityError: the length, or the whole batch at once, is not possible.
    """
    most = most_tokens(engine, input_len, output_len, batch_size, fill_cache)
    if input_len + most > engine.max_model_len:
        raise ValueError(
            f"{input_len} tokens and up to {most} new ones exceed max_model_len {engine.max_model_len}; measure "
            "shorter inputs or outputs, or raise max_model_len"
        )
    engine.scheduler.check_batch(batch_size, input_len, most, fill_cache)
    if batch_size > engine.options.max_num_seqs:
        raise ValueError(
            f"the batch size {batch_size} exceeds max_num_seqs {engine.options.max_num_seqs}; raise max_num_seqs"
        )


def measure_latency(
    llm: LLM,
    input_len: int,
    output_len: int,
    *,
    batch_size: int = 1,
    warmup: int = 1,
    repeat: int = 3,
    seed: int = 0,
    links: Links | None = None,
    fill_cache: bool = False,
) -> LatencyResult:
    """Generates ``output_len`` tokens for ``batch_size`` random prompts, ``warmup + repeat`` times, and once more.

    With ``fill_cache`` no prompt is computed: caches are filled with random rows, and only decode is measured.
    The last run is not timed: in it the stages are, and the collectives of an emulated rank are written down, which
    costs time of its own in small steps. ``links`` are those of an emulated run.
    """
    engine, mesh = llm.engine, llm.engine.mesh
    runs: list[Generation] = []
    follow_steps(engine)
    reset_peak(mesh.device)
    for i in range(warmup + repeat + 1):
        prompts = [random_prompt(engine, input_len, seed + i * batch_size + b) for b in range(batch_size)]
        _barrier(engine)
        run = generate_batch(engine, prompts, output_len, watch=i == warmup + repeat, fill_cache=fill_cache)
        if i >= warmup:
            runs.append(run)
    seen = _Seen(runs.pop(), isinstance(mesh, EmulatedMesh), links or Links())
    peaks = from_all_ranks(engine, [float(peak_bytes(mesh.device))])
    world = mesh.world_size

    def figure(name: str, seconds: list[float], tokens: int, steps: slice, per: float = 1.0) -> Figure:
        """``seconds`` of ``steps``, the rank's own share of them; and the communication in those for ``per`` tokens."""
        own = seen.own_share(steps)
        return Figure(name, [s * own for s in seconds], tokens, world, seen.communication(steps, per))

    ttft = prefill = tpot = itl = None
    prefill_stages: list[dict[str, float]] = []
    if not fill_cache:
        upto = slice(0, max(seen.run.first) + 1)
        # The request in the middle of the batch stands for all: it has waited for the steps up to its first token.
        middle = sorted(seen.run.first)[batch_size // 2]
        upto_first = [slice(0, step + 1) for step in seen.run.first]
        times = [s * seen.own_share(steps) for run in runs for s, steps in zip(run.ttft, upto_first, strict=True)]
        ttft = Figure("ttft", times, input_len, world, seen.communication(slice(0, middle + 1)))
        prefill = figure("prefill", [max(run.ttft) for run in runs], input_len * batch_size, upto)
        prefill_stages = _of_all_ranks(engine, seen.stages(upto))
    decode_stages: list[dict[str, float]] = []
    if seen.run.decode is not None:
        steps, count = slice(*seen.run.decode), seen.run.decode[1] - seen.run.decode[0]
        per_token = [sum(run.itl) / run.decoded for run in runs]
        tpot = figure("tpot", per_token, batch_size, steps, per=seen.run.decoded)
        itl = figure("itl", [s for run in runs for s in run.itl], batch_size, steps, per=count)
        decode_stages = _of_all_ranks(engine, seen.stages(steps, seen.run.decoded))
    return LatencyResult(
        input_len=input_len,
        output_len=output_len,
        batch_size=batch_size,
        ttft=ttft,
        prefill=prefill,
        tpot=tpot,
        itl=itl,
        peak_memory_bytes=[int(row[0]) for row in peaks],
        prefill_stages=prefill_stages,
        decode_stages=decode_stages,
    )


class _Seen:
    """What a watched run tells of its steps."""

    def __init__(self, run: Generation, emulated: bool, links: Links):
        self.run = run
        self._stages = [one.stage_seconds() for one in run.passes]
        self._emulation = [one.emulation_seconds() for one in run.passes]
        self._communication = [one.communication(links) for one in run.passes] if emulated else None

    def stages(self, steps: slice, per: float = 1.0) -> dict[str, float]:
        return {name: s / per for name, s in _sum(self._stages[steps]).items()}

    def own_share(self, steps: slice) -> float:
        """The share of the time that was the rank's own work; the rest went into standing in for other ranks."""
        own = sum(sum(stages.values()) for stages in self._stages[steps])
        return own / (own + sum(self._emulation[steps]))

    def communication(self, steps: slice, per: float = 1.0) -> Communication | None:
        return None if self._communication is None else Communication.sum(self._communication[steps]).scaled(1 / per)


def from_all_ranks(engine: Engine, values: list[float]) -> list[list[float]]:
    """The same numbers of every rank, to every rank, in rank order; of an emulated run there is one rank."""
    if isinstance(engine.mesh, EmulatedMesh):
        return [values]
    mine = torch.tensor([values], dtype=torch.float64, device=engine.mesh.device)
    return engine.mesh.world.all_gather(mine).tolist()


def _of_all_ranks(engine: Engine, values: dict[str, float]) -> list[dict[str, float]]:
    return [dict(zip(values, row, strict=True)) for row in from_all_ranks(engine, list(values.values()))]


def _barrier(engine: Engine) -> None:
    from_all_ranks(engine, [0.0])


def _sum(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _mean(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: s / len(parts) for name, s in _sum(parts).items()}


def _ms(seconds: dict[str, float]) -> dict[str, float]:
    return {name: s * 1e3 for name, s in seconds.items()}
