"""Expert parallelism: the routed experts of a model, divided over ranks.

* :mod:`.placement`: which rank holds which experts
* :mod:`.expert_parallel`: one rank's view, which starts a dispatch
* :mod:`.dispatch`: the interface of a dispatch: tokens travel to their experts, and weighted sums travel back
* :mod:`.all_to_all`, :mod:`.all_gather`, :mod:`.by_node`: the dispatches; :mod:`.deep_ep`: those of a library
* :mod:`.traffic`: the modelled time of each, and the choice between them
"""

from typing import Literal

DispatchMethod = Literal["all_to_all", "all_gather", "by_node"]  # those that "auto" chooses from
MoeDispatch = Literal[DispatchMethod, "deep_ep", "auto"]  # what the options offer
StepDispatch = Literal[MoeDispatch, "low_latency"]  # of a step: decode with "deep_ep" is "low_latency"
CombineDtype = Literal["auto", "fp8"]
