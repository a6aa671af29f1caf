"""The division of work over ranks: one strategy per file, over collectives that are the identity in a group of one."""

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
