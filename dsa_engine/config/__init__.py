"""The configuration of a model (``config.json``, the released models), and the declaration and checks of options.

It imports no other room; all rooms but the kernels may import it.
"""
