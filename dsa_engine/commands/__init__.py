"""The commands of ``dsa-engine``, with their options: a file each; bench, doctor and planner are folders."""
