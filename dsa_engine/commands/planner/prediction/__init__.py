"""TTFT, TPOT and rates of one deployment, predicted from a device's figures.

* `devices.py`: figures of devices, each with its source
* `efficiency.py`: the part of a device's peak that each stage reaches: assumed, or from measured runs
* `deployment.py`: one way to use some ranks, its memory on each rank, its other collectives
* `exchange.py`: how tokens travel to their experts and back, by dispatch
* `stages.py`: seconds of each stage
* `predict.py`, `predicted.py`: a prefill and a decode step, and what is known of them
"""
