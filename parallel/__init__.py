"""How the work is divided: one strategy per file, over collectives that are the identity when a group has one rank.

* :mod:`~dsa_engine.parallel.group`: a process group and its collectives
* :mod:`~dsa_engine.parallel.config`: the options; :mod:`~dsa_engine.parallel.option_fields`: what an option is
* :mod:`~dsa_engine.parallel.mesh`: which ranks form which group
* :mod:`~dsa_engine.parallel.context`: context parallelism, the split of a sequence and the gather of its cache rows
* :mod:`~dsa_engine.parallel.expert`: expert parallelism, two dispatches
* :mod:`~dsa_engine.parallel.tensor`: local tensor parallelism of embedding, output projection and LM head
* :mod:`~dsa_engine.parallel.streams`: work on a side stream
* :mod:`~dsa_engine.parallel.failure`: how a run of several processes ends when one of them fails
"""

from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.mesh import Mesh

__all__ = ["Mesh", "ParallelConfig"]
