"""The engine's operations, one per file: a reference that defines the operation, and the function that runs it.

A public function checks its arguments and picks the implementation (`runtime/launch.py`). The reference is plain
PyTorch, is exact enough to be the definition and fast enough to be the CPU path, and never allocates in proportion to
S²; the Triton kernel serves CUDA. Where the CPU path spends its time there is a kernel for it as well, in C++
(`runtime/cpu.py`).

Terms, the same in every file: a *pool* is a paged cache ``[pages, page_size, width]``; a *slot* is a row of it
(``page * page_size + offset``), and slot −1 means nowhere; a *position* is a token's place in its sequence; a
:class:`~dsa_engine.kernels.rows.segment.Segment` is some consecutive query tokens of one sequence.
"""
