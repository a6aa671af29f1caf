"""The commands of ``dsa-engine``, with their options: a file each; bench, check, doctor and planner are folders."""
