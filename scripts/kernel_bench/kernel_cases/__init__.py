"""Every kernel at production sizes: operations with their inputs and what they are compared with."""
