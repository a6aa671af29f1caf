"""One rank of many on one device: made-up groups, assigned expert choices, modelled links.

* `config.py`, `mesh.py`, `group.py`, `expert_parallel.py`: what takes the place of the real ones
* `stand_ins.py`: how long it takes to make up what the other ranks send
* `routing.py`, `assigned_experts.py`: which experts the tokens of all ranks choose
* `links.py`, `overlap_model.py`: how long communication would take, and what it would hide behind
* `arguments.py`: the scripts' options
"""
