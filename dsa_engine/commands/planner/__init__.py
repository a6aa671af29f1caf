"""``dsa-engine plan``: the best use of some devices for a model and its requests, modelled roughly.

* `devices.py`: figures of devices, each with its source
* `roofline.py`: seconds of a stage, from its counted work
* `deployment.py`: one way to use some ranks, and its memory on each
* `predict.py`: seconds of a prefill and of a decode step
* `search.py`: the best plan for a demand
* `command.py`: its options and its table
"""
