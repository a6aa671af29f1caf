"""``dsa-engine plan``: predicted times and rates of deployments, and the search for the best one.

* `devices.py`: figures of devices, each with its source
* `efficiency.py`: the part of a device's peak that each stage reaches: assumed, or from measured runs
* `deployment.py`: one way to use some ranks, its memory on each rank, its other collectives
* `exchange.py`: seconds in which tokens travel to their experts and back, by dispatch
* `predict.py`: TTFT, TPOT and rates of a deployment
* `plan.py`: the demand, and a plan
* `search.py`: the best plan for a demand
* `published.py`: deployments that others have published, predicted
* `check.py`: predictions beside measured runs, stage by stage
* `tables.py`, `sweep.py`: what ``dsa-engine plan`` prints and draws
* `command.py`: its options
"""
