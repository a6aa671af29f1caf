"""What ``dsa-engine`` can do: one file for each command, with its options and its work."""
