"""The engine's operations, one a file: a reference that defines the operation, and the function that runs it.

    attention/   over the latent cache and over expanded keys and values
    indexer/     scores of the lightning indexer, selection, index queries
    moe/         routing, packing and ordering of tokens, experts
    linear/      linear layers of all weight formats
    grouped/     products of groups of rows, which `moe/` and `linear/` launch
    rows/        what is done to the rows of a step; segments and slots; rows of paged pools
    formats/     how numbers are stored, and operations that convert them
    runtime/     how operations run, launch and are compared
    cpu/         C++ sources of the CPU's kernels

A room imports from the rooms below it (`tests/kernels/test_rooms.py`). Files that begin with an underscore serve their
room only.

A public function checks its arguments and picks the implementation (`runtime/launch.py`). The reference is plain
PyTorch, is exact enough to be the definition and fast enough to be the CPU path, and never allocates in proportion to
S²; the Triton kernel serves CUDA. Where the CPU path spends its time there is a kernel for it as well, in C++
(`runtime/cpu.py`).

Terms, the same in every file: a *pool* is a paged cache ``[pages, page_size, width]``; a *slot* is a row of it
(``page * page_size + offset``), and slot −1 means nowhere; a *position* is a token's number in its sequence, from 0; a
:class:`~dsa_engine.kernels.rows.segment.Segment` is some consecutive query tokens of one sequence.
"""
