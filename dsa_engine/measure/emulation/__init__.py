"""One rank of many on one device: made-up groups, assigned expert choices, modelled links.

* `config.py`, `mesh.py`, `group.py`, `expert_parallel.py`: subclasses that replace the real ones
* `stand_ins.py`: the time that it takes to make up the other ranks' messages
* `routing.py`, `assigned_experts.py`: the experts that the tokens of all ranks choose
* `two_levels.py`: what comes to the rank in a dispatch by machine
* `overlap_model.py`: the time that communication would take, and the part that work would hide
* `arguments.py`: the scripts' options
"""
