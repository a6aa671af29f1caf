"""How to divide the work over the processes of a run: what a user says."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dsa_engine.parallel.mesh import Mesh

CpLayout = Literal["head_tail", "contiguous"]
MoeDispatch = Literal["all_to_all", "all_gather"]


@dataclass(frozen=True)
class ParallelConfig:
    """How to use the processes of a ``torchrun`` world; the defaults fit any world.

    Attributes:
        cp_size: ranks that prefill a sequence together; default: the whole world. It must divide the world size; with
            less than the world, several groups prefill different sequences.
        tp_size: neighbouring ranks that share embedding, output projection and LM head. It is no tensor parallelism of
            attention: every rank computes all heads of its own tokens.
        moe_dispatch: of prefill steps: "all_to_all" sends tokens to the ranks that hold their experts; "all_gather"
            gives every rank all tokens and sums the results (static shapes).
        decode_dispatch: the same, of decode steps. CUDA graphs need the static shapes of "all_gather".
        cp_layout: "head_tail" balances causal work; "contiguous" is there to show what that is worth.
        timeout: seconds after which a collective that does not complete ends the run.

    Raises:
        ValueError: a value is not possible; the text says what is.
    """

    cp_size: int | None = None
    tp_size: int = 1
    moe_dispatch: MoeDispatch = "all_to_all"
    decode_dispatch: MoeDispatch = "all_gather"
    cp_layout: CpLayout = "head_tail"
    timeout: float = 600.0

    def __post_init__(self) -> None:
        for name, value in (("cp_size", self.cp_size), ("tp_size", self.tp_size)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name, chosen, allowed in (
            ("moe_dispatch", self.moe_dispatch, get_args(MoeDispatch)),
            ("decode_dispatch", self.decode_dispatch, get_args(MoeDispatch)),
            ("cp_layout", self.cp_layout, get_args(CpLayout)),
        ):
            if chosen not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {chosen!r}")
        timeout = self.timeout
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, not {self.timeout!r}")

    def create_mesh(self, device: str = "auto") -> Mesh:
        """The mesh of this process, as :meth:`Mesh.create`; a subclass may make one of another kind."""
        return Mesh.create(self, device)
