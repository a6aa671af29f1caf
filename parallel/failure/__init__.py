"""Failed ranks: each rank finds out that another one has failed, names it, and ends.

* :mod:`.reporter`: how a run of several processes ends when one of them fails
* :mod:`.joining`: a process joins a run, or names what did not come
* :mod:`.watch`: the thread that learns of a failure while the main thread waits
* :mod:`.store`: the key-value store of the run, through which ranks report their errors
* :mod:`.peers`: the processes of the other ranks of this machine
* :mod:`.absence`: ranks that others wait for, and that have ended or are stopped
"""
