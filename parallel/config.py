"""The options for the processes of a ``torchrun`` world."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from dsa_engine.config.checks import PositiveInt, Rule, Seconds, at_least
from dsa_engine.config.fields import Options, chosen, documented, option
from dsa_engine.parallel.experts import KINDS, CombineDtype, MoeDispatch

_FILE = Rule("that names a file", lambda value: str(value) not in ("", ".", "-"))
_LOADS = Rule("with one above 0", any)
File = Annotated[str | Path, _FILE]
Loads = Annotated[tuple[Annotated[float, at_least(0)], ...], _LOADS]


@documented
@dataclass(frozen=True)
class ParallelConfig(Options):
    """How to use the processes of a ``torchrun`` world; the defaults fit any world."""

    cp_size: PositiveInt | None = option(
        None,
        "context parallelism: ranks that prefill a sequence together. It must divide the world size; with less than "
        "the world, several groups prefill different sequences. Default: chosen; the world on a CPU.",
        group="parallel (under torchrun)",
    )
    dcp_size: PositiveInt = option(
        chosen(1),
        "decode context parallelism: neighbouring ranks that hold the cache of a request together, each page on one of "
        "them, and attend to it together. It must divide cp_size. 1: a request decodes on the rank that holds all of "
        "its pages. Default: chosen, 1 where the longest request fits a rank; 1 on a CPU.",
    )
    tp_size: PositiveInt = option(
        chosen(1),
        "neighbouring ranks that divide embedding, output projection and LM head. It is not attention TP: every rank "
        "computes all heads of its tokens. Default: chosen; 1 on a CPU.",
        common=True,
    )
    moe_dispatch: MoeDispatch = option(
        chosen("all_to_all"),
        'in prefill steps: "all_to_all" sends tokens to the ranks that hold their experts; "all_gather" gives every '
        'rank all tokens and sums the results (static shapes); "by_node" is as "all_to_all", but a token crosses to '
        'a node once, and is passed on inside; "deep_ep" is as "all_to_all", by the library DeepEP, which must be '
        'installed (docs/RUNNING.md: not yet run on a GPU); "auto" takes what modelled links say is fastest for a '
        "step's size, of the first three. "
        'Default: chosen: "auto"; "all_to_all" on a CPU.',
    )
    decode_dispatch: MoeDispatch = option(
        "all_gather",
        'the same in decode steps. CUDA graphs need the static shapes of "all_gather" or "deep_ep" (DeepEP\'s '
        'low-latency mode); "auto" takes "all_gather" on CUDA.',
    )
    moe_combine_dtype: CombineDtype = option(
        "auto",
        'numbers of the experts\' sums on their way back: "auto" is the dtype of the run; "fp8" sends codes and '
        "scales, about half of bfloat16's bytes, in an all-to-all and between nodes. A sum that travels is rounded "
        "once: docs/QUANTIZATION.md has the cost in accuracy, and tokens depend on how experts are divided over ranks. "
        '"all_gather" adds sums on their way, which codes do not allow, and keeps the dtype of the run, as "deep_ep" '
        "does.",
    )
    moe_chunk_size: PositiveInt | None = option(
        None,
        "maximum number of token-expert pairs that a rank computes at a time. If routing brings a rank more, they are "
        "computed in several rounds, so that skew costs time and not memory; sums add in the same order. "
        "Default: the pairs of balanced routing, max_num_batched_tokens times the experts of a token.",
    )
    redundant_experts: Annotated[int, at_least(0)] = option(
        chosen(0),
        "physical experts in each layer beyond the model's own, on all ranks together: replicas of the experts with "
        "the largest loads, which share their tokens. Each takes the memory of an expert in every layer. Default: one "
        "for each rank if expert_loads or rebalance_every is given and memory allows it.",
    )
    expert_loads: File | Loads | None = option(
        None,
        "a file with the loads of each layer's experts, by which they are placed on ranks, so that ranks have equal "
        "loads; or a load of each expert, the same in all layers. Default: equal loads.",
        metavar="FILE",
    )
    record_expert_loads: File | None = option(
        None,
        "counts how often tokens choose each expert and writes it to this file, every 500 steps and at the end: what "
        "``expert_loads`` reads. Rank 0 writes, for all ranks. Default: nothing is counted.",
        metavar="FILE",
    )
    rebalance_every: PositiveInt | None = option(
        None,
        "number of steps after which experts move, while requests run, to where the loads since the last time want "
        "them, with ``redundant_experts`` replicas. A step moves few, and tokens stay the same. It needs several "
        "ranks. Default: experts stay.",
        metavar="STEPS",
    )
    prefill_ranks: PositiveInt | None = option(
        None,
        "this number of first ranks only prefill, and the others only decode: each part has its own weights, "
        "caches and steps, and the cache rows of a prompt travel between them. Rank 0 calls, all others follow. "
        "cp_size divides the part that prefills, tp_size both. Default: all ranks do both.",
    )
    timeout: Seconds = option(
        600.0,
        "seconds after which a collective that does not complete ends the run.",
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        methods = self.moe_dispatch, self.decode_dispatch
        if self.moe_combine_dtype == "fp8" and all(KINDS[method].adds_sums for method in methods):
            others = ", ".join(f"{name!r}" for name, kind in KINDS.items() if not kind.adds_sums)
            raise ValueError(
                "moe_combine_dtype 'fp8': moe_dispatch {!r} and decode_dispatch {!r} add sums on their way back, and "
                "codes cannot be added; use one of {} for one of them, or leave it out".format(*methods, others)
            )

    def node_ranks(self) -> int:
        """Number of the run's ranks on a node."""
        from dsa_engine.parallel.launch_environment import local_world_size

        return local_world_size()

    def run_position(self) -> tuple[int, int]:
        """The rank of this process, and the number of all ranks of the run."""
        import torch.distributed as dist

        from dsa_engine.parallel.launch_environment import launched_rank

        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else launched_rank()
