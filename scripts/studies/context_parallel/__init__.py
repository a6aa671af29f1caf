"""Ways to divide the attention of one prefill over ranks, compared: each computes the same and sends other things.

* :mod:`.layer`: one layer's sizes, inputs and weights, and the layer in a single process
* :mod:`.division`: which rank has which tokens
* :mod:`.form`: what every form has to tell
* :mod:`.gathered`: cache rows by all-gather, head-tail (the engine's) or contiguous
* :mod:`.ulysses`: heads by all-to-all, through DeepSpeed's sequence layer
* :mod:`.ring`: blocks of cache rows from neighbour to neighbour
* :mod:`.sent_bytes`: what a process sends, counted as PyTorch is told to send it
* :mod:`.study`: outputs compared, then bytes, work, memory and time of each form on the ranks that there are
* :mod:`.many_ranks`: the same counted by formula for a world that is not there
"""
