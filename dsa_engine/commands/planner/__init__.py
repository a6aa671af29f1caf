"""``dsa-engine plan``: predicted times and rates of deployments, and the search for the best one.

* `prediction/`: TTFT, TPOT and rates of a deployment
* `plan.py`: the demand, and a plan
* `search.py`: the best plan for a demand
* `published.py`: deployments that others have published, predicted
* `check.py`: predictions beside measured runs, stage by stage
* `tables.py`, `sweep.py`: what ``dsa-engine plan`` prints and draws
* `command.py`: its options
"""
