"""Products of consecutive groups of rows, each group with its own matrix, one file for each weight format."""
