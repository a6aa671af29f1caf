"""TTFT at 128K and TPOT of DeepSeek-V3.2 on 64 H200 as the planner predicts them, with one more change in each row.

Everything is modelled: counted work, fractions of a device's peak that were estimated, links by their data sheets.
Nothing was measured on a GPU.

With ``--emulate`` the engine also runs the steps as rank 0 of 64 emulated ranks on this CPU: three layers in which all
that travels has V3.2's sizes, and what does not travel is small. The collectives and their bytes are then those of the
engine's program; their seconds are modelled. So is what they lie under: each stage takes the seconds that the planner
predicts for V3.2's own sizes on an H200, not those of the CPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from dsa_engine.arguments import add_json_argument, argument_parser, run
from dsa_engine.commands.planner.prediction.deployment import Deployment, Placed
from dsa_engine.commands.planner.prediction.devices import DEVICES
from dsa_engine.commands.planner.prediction.efficiency import TOP_K, Efficiencies
from dsa_engine.commands.planner.prediction.predict import (
    COMBINE,
    DISPATCH,
    SLOWED,
    StageTime,
    predict_decode,
    predict_prefill,
)
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.engine.engine import Engine
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.llm import LLM
from dsa_engine.measure.emulation.config import EmulatedConfig
from dsa_engine.measure.emulation.mesh import follow_steps
from dsa_engine.measure.emulation.overlap_model import Pass, replay, watched
from dsa_engine.measure.filled_requests import add_filled
from dsa_engine.measure.report import format_table, write_json
from dsa_engine.model.moe import MoE
from dsa_engine.parallel.collective_log import Collective
from dsa_engine.parallel.experts.traffic import Routing, RowBytes, collectives, expected, quantized_bytes
from dsa_engine.sampling_params import SamplingParams

RANKS, TOKENS, OUTPUT, REQUESTS = 64, 131_072, 1024, 64
MANY = 512  # requests, so that each rank can cut its own into two batches in decode
DRAFTED = 2.5  # tokens of a step with three drafts; 2.16 times the speed is published for 8 B200
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "first_k_dense_replace": 1}
MOES = 2
# Sizes that do not travel, for a CPU. Hidden size, cache rows, experts and their groups stay.
SMALL: dict[str, Any] = {
    "vocab_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 128,
    "index_topk": 64,
}
SMALL |= {"index_n_heads": 2, "intermediate_size": 128, "moe_intermediate_size": 128}
SKEW = {0: 2.1, RANKS: 1.1}  # busiest rank over the mean by redundant experts: a load by Zipf's law, assumed


class Step(NamedTuple):
    """A change, and the deployments that have it and those before it."""

    name: str
    prefill: Deployment
    decode: Deployment


def steps() -> Iterator[Step]:
    prefill = Deployment(RANKS, RANKS, cache="fp8")
    decode = replace(prefill, tp_size=8, dispatch="all_gather")
    changes: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("as before", {}, {}),
        ("+ shared expert beside the dispatch", {"beside_shared": True}, {"beside_shared": True}),
        ("+ tokens in FP8", {"dispatch_dtype": "fp8"}, {"dispatch_dtype": "fp8"}),
        ("+ dispatch by machine in prefill", {"dispatch": "by_machine"}, {}),
        ("+ two batches in prefill", {"two_batches": True}, {}),
        ("+ 64 redundant experts", {"redundant": RANKS}, {"redundant": RANKS}),
        ("+ three drafts", {}, {"drafts": 3}),
        ("+ cache rows and indexer beside the queries", {}, {"beside_queries": True}),
        ("+ output projection over 4 ranks, not 8", {}, {"tp_size": 4}),
        ("+ prefetch of weights in decode", {}, {"prefetch_weights": True}),
        ("+ sums in FP8 in prefill", {"combine_dtype": "fp8"}, {}),
    )
    for name, of_prefill, of_decode in changes:
        prefill, decode = replace(prefill, **of_prefill), replace(decode, **of_decode)
        yield Step(name, prefill, decode)


def predicted(step: Step, skewed: bool, requests: int = REQUESTS) -> tuple[float, float, float]:
    """TTFT and TPOT in milliseconds, and GiB that remain on a rank in decode."""
    config, reached = ModelConfig.from_dict(released_config("deepseek_v32")), Efficiencies.assumed()
    prefill, decode = (
        replace(how, imbalance=SKEW[how.redundant] if skewed else 1.0) for how in (step.prefill, step.decode)
    )
    ttft = predict_prefill(Placed(config, DEVICES["H200"], prefill), reached, TOKENS).ttft
    gained = DRAFTED if decode.drafts else 1.0
    placed, context = Placed(config, DEVICES["H200"], decode), TOKENS + OUTPUT // 2
    one = predict_decode(placed, reached, requests, context, gained, TOKENS + OUTPUT)
    return ttft * 1e3, one.tpot * 1e3, one.room / 2**30


def in_decode(step: Step) -> tuple[float, float]:
    """TPOT in milliseconds of ``MANY`` requests in one batch and in two."""
    one, two = (step._replace(decode=replace(step.decode, two_batches=cut)) for cut in (False, True))
    return predicted(one, False, MANY)[1], predicted(two, False, MANY)[1]


class Layer(NamedTuple):
    """What rank 0 sends in a MoE layer, and waits for.

    Attributes:
        between, inside: bytes to ranks of other machines, and to those of its own.
        exchange: modelled seconds to experts and back.
        waited: those that no computation hides.
        total: seconds of the whole pass of three layers.
        released: seconds of the pass of all layers, which the planner predicts, with this layer's ``waited``.
    """

    between: float
    inside: float
    exchange: float
    waited: float
    total: float
    released: float = 0.0

    def to_json(self) -> dict[str, float]:
        times = {"exchange_us": self.exchange * 1e6, "waited_us": self.waited * 1e6, "pass_ms": self.total * 1e3}
        whole = {"all_layers_ms": self.released * 1e3}
        return {"bytes_between": self.between, "bytes_inside": self.inside} | times | whole


def emulated(how: Deployment, tokens: int, decodes: bool) -> tuple[Layer, Layer]:
    """A MoE layer of the emulated rank, and the same layer as the planner has it.

    Args:
        tokens: of the prompt; with ``decodes``, those that every rank's request sees.
    """
    engine = emulated_engine(how, tokens)
    if decodes:
        for _ in range(RANKS):
            add_filled(engine, tokens - 1, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
    with watched(engine) as one:
        if decodes:
            engine.step()
        else:
            engine.prefill([5 + i % 1000 for i in range(tokens)])
    rows = 1 if decodes else cdiv(tokens, RANKS)
    placed, released = (
        Placed(
            ModelConfig.from_dict(released_config("deepseek_v32") | layers),
            DEVICES["H200"],
            replace(how, chunk=cdiv(tokens, RANKS)),
        )
        for layers in (LAYERS, {})
    )
    stages, total = _predicted_pass(placed, tokens, decodes)
    played, planned = _played(one, engine, placed, stages), _planned(engine, placed, stages, total, rows)
    _, whole = _predicted_pass(released, tokens, decodes)
    more = released.config.mlp_layer_types.count("sparse") * (played.waited - planned.waited)
    return played._replace(released=whole + more), planned._replace(released=whole)


def _predicted_pass(placed: Placed, tokens: int, decodes: bool) -> tuple[dict[str, StageTime], float]:
    """The stages of a prefill or of a decode step as the planner predicts them, and their seconds in all."""
    if decodes:
        step = predict_decode(placed, Efficiencies.assumed(), RANKS, tokens, 1.0, tokens)
        return step.stages, step.tpot
    prefill = predict_prefill(placed, Efficiencies.assumed(), tokens)
    return prefill.stages, prefill.ttft


def emulated_engine(how: Deployment, tokens: int) -> Engine:
    """The engine of rank 0, with a model of three layers."""
    split = {"moe_dispatch": how.dispatch, "decode_dispatch": how.dispatch, "tp_size": how.tp_size}
    split["moe_combine_dtype"] = "fp8" if how.combine_dtype == "fp8" else "auto"
    llm = LLM(
        "deepseek_v32",
        device="cpu",
        dtype="bfloat16",  # as on a GPU, since it is what travels
        load_format="dummy",
        hf_overrides=LAYERS | SMALL,
        quantization="fp8" if how.dispatch_dtype == "fp8" else "dequantize",
        kv_cache_dtype="fp8",
        max_model_len=tokens + 64,
        max_num_batched_tokens=cdiv(tokens, RANKS),
        enable_dbo=how.two_batches,
        dbo_prefill_token_threshold=2,
        cache_memory="512MiB",
        parallel=EmulatedConfig(emulate_world=RANKS, redundant_experts=how.redundant, **split),  # type: ignore[arg-type]
        progress=False,
    )
    follow_steps(llm.engine)
    return llm.engine


def _played(one: Pass, engine: Engine, placed: Placed, stages: dict[str, StageTime]) -> Layer:
    """The pass of the emulated rank, in which each stage computes as long as the planner says."""
    assert one.log is not None
    computed = {name: time.computed for name, time in stages.items() if name != SLOWED}
    computed["lightning indexer"] += computed.pop(TOP_K, 0.0)
    clock = one.timer.retimed(computed)
    played = replay(one.log, one.timer.begin, clock, placed.links, engine.mesh.machines)
    exchange, waited = (sum(times[name] for name in (DISPATCH, COMBINE)) for times in (played.total, played.stalls))
    travelled = [each for each in one.log.collectives if each.stage in (DISPATCH, COMBINE)]
    between, inside = _by_link(travelled, engine.mesh.machines)
    total = sum(computed.values()) + played.stalled_seconds
    return Layer(between / MOES, inside / MOES, exchange / MOES, waited / MOES, total)


def _planned(engine: Engine, placed: Placed, stages: dict[str, StageTime], total: float, rows: int) -> Layer:
    """The same by the formulas of the planner, which take random routing."""
    config, how, machines = placed.config, placed.how, engine.mesh.machines
    routing = Routing(config.num_experts_per_tok, config.n_group, config.topk_group)
    moe = next(module for module in engine.model.modules() if isinstance(module, MoE))
    tokens = expected(moe.expert_parallel.placement.held, machines, routing, [rows] * RANKS)
    back = 2 * config.hidden_size
    sent = quantized_bytes(config.hidden_size) if how.dispatch_dtype == "fp8" else back
    coded = quantized_bytes(config.hidden_size) if how.combine_dtype == "fp8" else None
    row = RowBytes.of(sent, config.num_experts_per_tok, back, coded)
    of_layer = collectives(how.dispatch, tokens, machines, row, 0)  # type: ignore[arg-type]
    waited = sum(stages[name].communicated for name in (DISPATCH, COMBINE))
    hidden = sum(stages[name].hidden for name in (DISPATCH, COMBINE))
    between, inside = _by_link(of_layer, machines)
    return Layer(between, inside, (waited + hidden) / MOES, waited / MOES, total)


def _by_link(travelled: Iterable[Collective], machines: tuple[int, ...]) -> tuple[int, int]:
    """Bytes to ranks of other machines, and to others of the machine of rank 0."""
    between = inside = 0
    for one in travelled:
        for rank, nbytes in zip(one.ranks, one.sent, strict=True):
            between += nbytes * (machines[rank] > 0)
            inside += nbytes * (machines[rank] == 0)
    return between, inside


def emulate(tokens: int) -> list[dict[str, Any]]:
    """Runs the steps that change a prefill, then those that change a decode, and prints them."""
    rows, results = [], []
    before: list[Deployment] = []
    for decodes in (False, True):
        for step in steps():
            how = step.decode if decodes else step.prefill
            # The shared expert is beside the dispatch always, and drafts would need an MTP layer.
            if not how.beside_shared or how.drafts or how in before:
                continue
            before.append(how)
            begun = time.perf_counter()
            played, planned = emulated(how, tokens, decodes)
            name = f"{'decode' if decodes else 'prefill'} {step.name}"
            both = played.to_json(), planned.to_json()
            results.append({"step": name, "emulated": both[0], "planner": both[1]})
            scales = [1e6 if key.startswith("bytes") else 1.0 for key in both[0]]
            values = zip(*(one.values() for one in both), scales, strict=True)
            rows.append((name, *(f"{mine / scale:.4g} of {theirs / scale:.4g}" for mine, theirs, scale in values)))
            print(f"{name}: {time.perf_counter() - begun:.0f} s", flush=True)
    header = ("step", "MB between machines", "MB inside", "exchange µs", "waited µs", "pass ms", "all layers ms")
    print(f"A MoE layer on rank 0 of {RANKS}, {tokens:,} tokens: emulated, of the planner's. Seconds are modelled")
    print(format_table(header, rows))
    return results


def parse() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    add_json_argument(parser)
    parser.add_argument("--emulate", type=int, metavar="TOKENS", help="also run an emulated rank with so many tokens")
    args = parser.parse_args()
    if args.emulate is not None and args.emulate < 2 * RANKS:
        raise ValueError(f"--emulate must be at least {2 * RANKS}, two tokens a rank, not {args.emulate}")
    return args


def main() -> None:
    args = parse()
    rows, results = [], []
    for step in steps():
        even, skewed = predicted(step, False), predicted(step, True)
        rows.append(
            (step.name, *(f"{x:.0f}" for x in (even[0], skewed[0])), *(f"{x:.1f}" for x in (even[1], skewed[1])))
        )
        names = ("ttft_ms", "tpot_ms", "room_gib")
        results.append({"step": step.name, "even": dict(zip(names, even)), "skewed": dict(zip(names, skewed))})
    one, two = in_decode(next(step for step in steps() if step.prefill.two_batches))
    header = ("change", "TTFT ms", "TTFT ms, skewed", "TPOT ms", "TPOT ms, skewed")
    print(f"Modelled, DeepSeek-V3.2 on {RANKS} H200, {TOKENS:,} tokens, {REQUESTS} requests; nothing was measured")
    print(format_table(header, rows))
    print(f"TPOT of {MANY} requests without drafts: {one:.1f} ms, with two batches in decode {two:.1f} ms")
    ran = {"emulated": emulate(args.emulate), "emulated_tokens": args.emulate} if args.emulate else {}
    if args.json:
        about = {"modelled": True, "skew": SKEW, "tokens_per_step": DRAFTED}
        decode = {"requests": MANY, "tpot_ms": one, "tpot_ms_two_batches": two}
        write_json(args.json, {**about, "steps": results, "two_batches_in_decode": decode, **ran})


if __name__ == "__main__":
    run(main)
