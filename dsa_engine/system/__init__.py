"""The process and its user: log, progress, result files, sizes in words, and Ctrl-C at a harmless moment."""
