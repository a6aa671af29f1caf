"""Deployments on paper: which cut of a model over which devices, and what time and rate to expect.

* `devices.py`: figures of devices, each with its source
* `efficiency.py`: which part of a device's peak each stage reaches: assumed, or from measured runs
* `deployment.py`: one way to use some ranks, what it takes of each rank's memory, its collectives
* `roofline.py`: seconds of every stage, and what limits it
* `predict.py`: TTFT, TPOT and rates of a deployment
* `plan.py`: what is asked for, and a plan
* `search.py`: the best one
* `published.py`: deployments that others have reported, predicted
* `check.py`: predictions beside measured runs, stage by stage
* `tables.py`, `sweep.py`: what ``dsa-engine plan`` prints and draws
"""
