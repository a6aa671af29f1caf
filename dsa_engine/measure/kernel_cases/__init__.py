"""Every kernel at production sizes: compiled without a GPU (``inspection``), measured on one (``bench``).

``cases_*`` hold the operations with their inputs and what a user would otherwise call, ``cases`` lists them.
"""
