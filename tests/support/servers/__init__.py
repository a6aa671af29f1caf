"""Servers for tests of what calls a server: the benchmark of serving, the page."""
