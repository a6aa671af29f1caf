"""Servers for tests of what calls a server: the router, the benchmark of serving, the page."""
