"""Expert parallelism: the routed experts of a model, divided over ranks; and the dispatches by name.

:mod:`.placement` has one rank's view of them, :mod:`.dispatch` the interface of a dispatch, and a module each of
:data:`KINDS`.
"""

from typing import Literal, NamedTuple

DispatchMethod = Literal["all_to_all", "all_gather", "by_node"]  # those that "auto" chooses from
MoeDispatch = Literal[DispatchMethod, "deep_ep", "auto"]  # the keys of KINDS
CombineDtype = Literal["auto", "fp8"]


class Kind(NamedTuple):
    """What is known of a dispatch before there is a mesh. ``make`` of the module with its name gives a mesh's
    :class:`.dispatch.Dispatcher`."""

    static_decode: bool = False  # shapes of decode steps do not depend on the routing, as CUDA graphs need it
    adds_sums: bool = False  # sums are added on their way back, which codes do not allow
    node_groups: bool = False  # it takes the groups inside and between nodes, where nodes have two levels
    on_nodes: bool = False  # experts of a router's group are to lie on one node
    emulated: bool = True  # one process can stand for a rank of many
    library: tuple[str, str] | None = None  # the package that must be installed, and what its users call it


KINDS = {
    "all_to_all": Kind(),
    "all_gather": Kind(static_decode=True, adds_sums=True),
    "by_node": Kind(node_groups=True, on_nodes=True),
    "deep_ep": Kind(static_decode=True, adds_sums=True, on_nodes=True, emulated=False, library=("deep_ep", "DeepEP")),
    "auto": Kind(node_groups=True, on_nodes=True),
}
