"""What a model is (``config.json``, the released models), and how options are declared and checked.

Everything else of the engine but the kernels builds on it: it imports no other room.
"""
