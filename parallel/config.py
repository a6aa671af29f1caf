"""The options for the processes of a ``torchrun`` world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dsa_engine.config.checks import integer, is_number, number
from dsa_engine.config.fields import BOOL, POSITIVE_INT, Kind, Options, choice, documented, option
from dsa_engine.parallel.context_parallel import CpLayout
from dsa_engine.parallel.experts import CombineDtype, MoeDispatch

if TYPE_CHECKING:
    from dsa_engine.parallel.mesh import Mesh


def _check_loads(name: str, value: Any) -> None:
    if isinstance(value, (str, Path)) and str(value) not in ("", "."):
        return
    if not isinstance(value, (tuple, list)):
        raise ValueError(f"{name} must be the path of a file, or loads of each expert, not {value!r:.80}")
    if not all(is_number(load) and load >= 0 for load in value) or not any(value):
        raise ValueError(f"{name} must be numbers of at least 0, and one above it, not {value!r:.80}")


class MeshOptions(Protocol):
    """The options that a mesh and the model on it read; :class:`ParallelConfig` describes them."""

    @property
    def cp_size(self) -> int | None: ...
    @property
    def tp_size(self) -> int: ...
    @property
    def moe_dispatch(self) -> MoeDispatch: ...
    @property
    def decode_dispatch(self) -> MoeDispatch: ...
    @property
    def moe_combine_dtype(self) -> CombineDtype: ...
    @property
    def moe_chunk_size(self) -> int | None: ...
    @property
    def redundant_experts(self) -> int: ...
    @property
    def route_shared_expert(self) -> bool: ...
    @property
    def expert_loads(self) -> str | Path | Sequence[float] | None: ...
    @property
    def rebalance_every(self) -> int | None: ...
    @property
    def record_expert_loads(self) -> str | Path | None: ...
    @property
    def cp_layout(self) -> CpLayout: ...
    @property
    def timeout(self) -> float: ...


def _check_record(name: str, value: Any) -> None:
    if not isinstance(value, (str, Path)) or str(value) in ("", ".", "-"):
        raise ValueError(f"{name} must be the path of a file, not {value!r:.80}")


@documented
@dataclass(frozen=True)
class ParallelConfig(Options):
    """How to use the processes of a ``torchrun`` world; the defaults fit any world.

    Raises:
        TypeError, ValueError: an option is not known or not possible; the text says what is.
    """

    cp_size: int | None = option(
        POSITIVE_INT,
        None,
        "context parallelism: ranks that prefill a sequence together; default: the whole world. It must divide the "
        "world size; with less than the world, several groups prefill different sequences.",
        help="ranks that prefill a sequence together; default: all",
    )
    tp_size: int = option(
        POSITIVE_INT,
        1,
        "neighbouring ranks that divide embedding, output projection and LM head. It is not attention TP: every rank "
        "computes all heads of its tokens.",
        help="neighbours that divide embedding, o_proj and LM head; attention heads are not divided",
    )
    moe_dispatch: MoeDispatch = option(
        choice(MoeDispatch),
        "all_to_all",
        'in prefill steps: "all_to_all" sends tokens to the ranks that hold their experts; "all_gather" gives every '
        'rank all tokens and sums the results (static shapes); "by_machine" is as "all_to_all", but a token crosses to '
        'a machine once, and is passed on inside; "auto" takes what modelled links say is fastest for a step\'s size.',
        help="dispatch of tokens to experts in prefill",
    )
    decode_dispatch: MoeDispatch = option(
        choice(MoeDispatch),
        "all_gather",
        'the same in decode steps. CUDA graphs need the static shapes of "all_gather", so this is what "auto" takes on '
        "CUDA.",
        help="the same in decode",
    )
    moe_combine_dtype: CombineDtype = option(
        choice(CombineDtype),
        "auto",
        'numbers of the experts\' sums on their way back: "auto" is the dtype of the run; "fp8" sends codes and '
        "scales, about half of bfloat16's bytes, in an all-to-all and between machines. A sum that travels is rounded "
        "once: docs/QUANTIZATION.md has the cost in accuracy, and tokens depend on how experts are divided over ranks. "
        '"all_gather" adds sums on their way, which codes do not allow, and keeps the dtype of the run.',
        help="numbers of the experts' sums on their way back; fp8: about half of bfloat16's bytes, less exact",
    )
    moe_chunk_size: int | None = option(
        POSITIVE_INT,
        None,
        "maximum number of token-expert pairs that a rank serves at a time. If routing brings a rank more, tokens are "
        "served in several rounds, so that skew costs time and not memory; sums add in the same order. "
        "Default: the pairs of balanced routing, max_num_batched_tokens times the experts of a token.",
        help="maximum token-expert pairs that a rank serves at a time; default: a balanced full step",
    )
    redundant_experts: int = option(
        Kind(integer(minimum=0), int, metavar="N"),
        0,
        "physical experts in each layer beyond the model's own, on all ranks together: replicas of the experts with "
        "the largest loads, which share their tokens. Each takes the memory of an expert in every layer.",
        help="replicas of experts in each layer, on all ranks together",
    )
    route_shared_expert: bool = option(
        BOOL,
        False,
        "the shared expert is one more routed expert, which every token chooses: it lies on the ranks that hold its "
        "replicas, not on all. Give ``redundant_experts`` for it.",
        help="the shared expert lies on some ranks only, as a routed one",
    )
    expert_loads: str | Path | tuple[float, ...] | None = option(
        Kind(_check_loads, metavar="FILE"),
        None,
        "a file with the loads of each layer's experts, by which they are placed on ranks, so that ranks have equal "
        "loads; or a load of each expert, the same in all layers. Default: equal loads.",
        help="JSON with the loads of experts, by which they are placed on ranks; default: equal loads",
    )
    record_expert_loads: str | Path | None = option(
        Kind(_check_record, metavar="FILE"),
        None,
        "counts how often tokens choose each expert and writes it to this file, every 500 steps and at the end: what "
        "``expert_loads`` reads. Rank 0 writes, for all ranks. Default: nothing is counted.",
        help="write the loads of experts here, for --expert-loads",
    )
    rebalance_every: int | None = option(
        Kind(integer(minimum=1), int, metavar="STEPS"),
        None,
        "after so many steps experts move, while requests run, to where the loads since the last time want them, with "
        "``redundant_experts`` replicas. A step moves few, and tokens stay the same. It needs several ranks. Default: "
        "experts stay.",
        help="move experts by their loads every so many steps; default: never",
    )
    cp_layout: CpLayout = option(
        choice(CpLayout),
        "head_tail",
        '"head_tail" balances causal work over the ranks; "contiguous" is there to measure the gain.',
        help="the tokens of a sequence that a rank prefills",
    )
    prefill_ranks: int | None = option(
        POSITIVE_INT,
        None,
        "the first so many ranks of the run only prefill, and the others only decode: each part has its own weights, "
        "caches and steps, and the cache rows of a prompt travel between them. Rank 0 calls, all others follow. "
        "cp_size divides the part that prefills, tp_size both. Default: all ranks do both.",
        help="the first N ranks only prefill, the others only decode; default: all do both",
    )
    timeout: float = option(
        Kind(number(above=0, what=" (seconds)"), float, metavar="SECONDS"),
        600.0,
        "seconds after which a collective that does not complete ends the run.",
        help="for a collective",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moe_combine_dtype == "fp8" and self.moe_dispatch == self.decode_dispatch == "all_gather":
            raise ValueError(
                "moe_combine_dtype 'fp8': moe_dispatch and decode_dispatch are both 'all_gather', which adds sums on "
                "their way back, and codes cannot be added; use 'all_to_all', 'by_machine' or 'auto' for one of them, "
                "or leave it out"
            )

    def run_position(self) -> tuple[int, int]:
        """The rank of this process, and the number of all ranks of the run."""
        import torch.distributed as dist

        from dsa_engine.parallel.launch_environment import launched_rank

        return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else launched_rank()

    def create_mesh(self, device: str = "auto", same: Callable[[], Mapping[str, str]] | None = None) -> Mesh:
        """The mesh of this process, as :meth:`Mesh.create`; a subclass may make another kind of mesh."""
        if self.prefill_ranks is not None:
            from dsa_engine.parallel.apart import mesh_of_part

            return mesh_of_part(self, device, same)
        from dsa_engine.parallel.mesh import Mesh  # it imports torch

        return Mesh.create(self, device, same=same)
