"""Seconds of a stage: the longer of its products and its bytes at the rates that kernels reach, and its launches.

    seconds = max(operations / (peak · part), bytes / (bandwidth · part)) + launches · cost of a launch

Nothing is measured on the devices of the table, so each time is a range: from kernels as others have tuned and
published them, to those of this project as estimated from their machine code, a third slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsa_engine.commands.planner.devices import Device
from dsa_engine.measure.costs.work import Work

# Large products, 790 of 989 TFLOP/s, and copies, 4.3 of 4.8 TB/s, were measured on one H200.
PRODUCT, COPY = 0.80, 0.90
# Rows of the caches are read in pieces of 132 to 1,152 bytes; the selection reads a long row of scores more than once.
CACHE_ROWS, SELECTION = {"sparse flash attention": 0.6, "lightning indexer": 0.8}, 0.5
# Launches of a layer's stage in a decode step with FP8 weights. The indexer's prolog has its own beside MLA's.
LAUNCHES = {
    "embedding": 1, "MLA prolog": 8, "indexer prolog": 0, "lightning indexer": 3, "sparse flash attention": 2,
    "MLA epilog": 3, "dense MLP": 3, "MoE gate": 4, "MoE experts": 4, "MoE shared": 3, "LM head": 2, "other": 28,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Kernels:
    """What a set of kernels reaches: parts of the peak of products, by stage; others reach ``PRODUCT``.

    Attributes:
        launch: seconds from one kernel's end to the next one's begin in a CUDA graph, and a small kernel's least time.
        eager: the same without a graph, in which the host launches each kernel.
        slack: factor of every time.
    """

    prefill: dict[str, float]
    decode: dict[str, float]
    launch: float
    eager: float
    slack: float = 1.0


# Sparse attention: 640 TFLOP/s in prefill and 410 in decode, FlashMLA on an H800. The others are assumed.
PUBLISHED = Kernels(
    {"lightning indexer": 0.5, "sparse flash attention": 0.65, "MoE experts": 0.6},
    {"lightning indexer": 0.5, "sparse flash attention": 0.41, "MoE experts": 0.5},
    launch=2e-6,
    eager=2e-6,
)
# From the machine code, the bytes that kernels read from L2, and figures of similar ones. FP8 experts in prefill are
# bound by L2 (docs/KERNELS.md).
OWN = Kernels(
    {"lightning indexer": 0.40, "sparse flash attention": 0.40, "MoE experts": 0.27},
    {"lightning indexer": 0.40, "sparse flash attention": 0.30, "MoE experts": 0.5},
    launch=3.3e-6,
    eager=6e-6,
    slack=1.33,
)


def stage_seconds(phase: str, name: str, work: Work, device: Device, kernels: Kernels, eager: bool = False) -> float:
    """Seconds of a stage in "prefill" or "decode".

    Args:
        eager: a decode step without a CUDA graph.
    """
    part = (kernels.prefill if phase == "prefill" else kernels.decode).get(name, PRODUCT)
    products = (work.flops - work.narrow_flops) / device.flops + work.narrow_flops / device.narrow_flops
    read, selected = work.bytes_moved, 0.0
    if name == "lightning indexer":  # scores are selected from when all of them have been written
        read, selected = work.bytes_read, work.activations
    moved = read / (device.bandwidth * CACHE_ROWS.get(name, COPY))
    seconds = max(products / part, moved) + selected / (device.bandwidth * SELECTION)
    launches = work.passes * LAUNCHES.get(name, 0) * (kernels.eager if eager else kernels.launch)
    return kernels.slack * (seconds + launches)
