"""Forms of context parallelism compared: ways to divide the attention of one prefill over ranks.

* :mod:`.layer`: one layer's sizes, inputs and weights, and the layer in a single process
* :mod:`.division`: the tokens of each rank
* :mod:`.form`: the interface of a form
* :mod:`.gathered`: cache rows by all-gather, head-tail (the engine's) or contiguous
* :mod:`.ulysses`: heads by all-to-all, through DeepSpeed's sequence layer
* :mod:`.ring`: blocks of cache rows from neighbour to neighbour
* :mod:`.sent_bytes`: bytes that a process sends, counted at PyTorch's collectives
* :mod:`.study`: outputs compared, then bytes, work, memory and time of each form on the ranks of the run
* :mod:`.many_ranks`: the same counted by formula for a larger world
"""
