"""One rank of many on one device: made-up groups, assigned expert choices, modelled links.

* `config.py`, `mesh.py`, `group.py`, `expert_parallel.py`: the emulated counterparts of the real classes
* `stand_ins.py`: time of the work done in place of the other ranks
* `routing.py`, `assigned_experts.py`: expert choices of the tokens of all ranks
* `links.py`, `overlap_model.py`: modelled time of communication, and the work that it overlaps with
* `arguments.py`: the scripts' options
"""
