"""The division of work over ranks: one strategy per file, over collectives that are the identity in a group of one.

* :mod:`~dsa_engine.parallel.config`: the options
* :mod:`~dsa_engine.parallel.mesh`: the groups that each rank belongs to, and the node of each rank
* :mod:`~dsa_engine.parallel.group`: a process group and its collectives
* :mod:`~dsa_engine.parallel.links`: modelled times of collectives
* :mod:`~dsa_engine.parallel.context_parallel`: context parallelism, the split of a sequence
* :mod:`~dsa_engine.parallel.tensor_parallel`: local tensor parallelism of embedding, output projection and LM head
* :mod:`~dsa_engine.parallel.experts`: expert parallelism: placement, and three dispatches
* :mod:`~dsa_engine.parallel.side_stream`: work on a side stream
* :mod:`~dsa_engine.parallel.agreement`: a comparison of texts that must be the same on all ranks
* :mod:`~dsa_engine.parallel.launch_environment`, :mod:`~dsa_engine.parallel.device`: a process's rank and device
* :mod:`~dsa_engine.parallel.failure`: failed ranks: found, named and ended
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dsa_engine.parallel.config import ParallelConfig

if TYPE_CHECKING:
    from dsa_engine.parallel.mesh import Mesh

__all__ = ["Mesh", "ParallelConfig"]


def __getattr__(name: str) -> Any:
    if name == "Mesh":  # it imports torch, which the options alone do not need
        from dsa_engine.parallel.mesh import Mesh

        return Mesh
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
