"""One rank of many on one device: its own work is real, the other ranks are made up.

* `config.py`, `mesh.py`, `group.py`, `expert_parallel.py`: subclasses that replace the real ones
* `arguments.py`: the benchmarks' options
"""
