"""How numbers are stored: cache rows, FP8, INT8, INT4, and the operations that convert them."""
