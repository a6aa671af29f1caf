"""Expert parallelism: the routed experts of a model, divided over ranks.

* :mod:`.placement`: which rank holds which experts
* :mod:`.expert_parallel`: one rank's view, which starts a dispatch
* :mod:`.dispatch`: the interface of a dispatch: tokens travel to their experts, and weighted sums travel back
* :mod:`.all_to_all`, :mod:`.all_gather`, :mod:`.by_machine`: the dispatches
"""

from typing import Literal

MoeDispatch = Literal["all_to_all", "all_gather"]  # what the options offer
DispatchMethod = Literal[MoeDispatch, "by_machine"]  # no mesh makes the groups of "by_machine" yet
