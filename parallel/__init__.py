"""How the work is divided: one strategy per file, over collectives that are the identity when a group has one rank.

* :mod:`~dsa_engine.parallel.config`: what a user says about all of it
* :mod:`~dsa_engine.parallel.mesh`: which ranks form which group, and on which machines they stand
* :mod:`~dsa_engine.parallel.group`: a process group and its collectives
* :mod:`~dsa_engine.parallel.collective_log`: collectives written down, for whoever measures
* :mod:`~dsa_engine.parallel.context_parallel`: context parallelism, the split of a sequence
* :mod:`~dsa_engine.parallel.experts.expert_parallel`: expert parallelism, two dispatches
* :mod:`~dsa_engine.parallel.experts.placement`: which expert lies on which rank
* :mod:`~dsa_engine.parallel.tensor_parallel`: local tensor parallelism of embedding, output projection and LM head
* :mod:`~dsa_engine.parallel.side_stream`: work on a side stream
* :mod:`~dsa_engine.parallel.agreement`: what has to be the same on all ranks, compared
* :mod:`~dsa_engine.parallel.launch_environment`: what a launcher tells a process
* :mod:`~dsa_engine.parallel.failure.peers`: which processes of other ranks live
* :mod:`~dsa_engine.parallel.failure.store`: the store in which they leave word for each other
* :mod:`~dsa_engine.parallel.failure`: how a run of several processes ends when one of them fails
* :mod:`~dsa_engine.parallel.failure.watch`: the thread that learns of it where the main one waits
"""

from dsa_engine.parallel.config import ParallelConfig
from dsa_engine.parallel.mesh import Mesh

__all__ = ["Mesh", "ParallelConfig"]
