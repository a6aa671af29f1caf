"""Expert parallelism: the routed experts of a model, divided over ranks.

* :mod:`.placement`: which rank holds which experts
* :mod:`.expert_parallel`: one rank's view, which starts a dispatch
* :mod:`.dispatch`: the interface of a dispatch: tokens travel to their experts, and weighted sums travel back
* :mod:`.all_to_all`, :mod:`.all_gather`, :mod:`.by_node`: the dispatches
* :mod:`.traffic`: the modelled time of each, and the choice between them
"""

from typing import Literal

DispatchMethod = Literal["all_to_all", "all_gather", "by_node"]
MoeDispatch = Literal[DispatchMethod, "auto"]  # what the options offer
CombineDtype = Literal["auto", "fp8"]
