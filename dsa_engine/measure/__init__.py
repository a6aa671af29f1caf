"""Measurement: stage times, memory, counted work, one emulated rank of a large world, and reports of all these.

Commands, scripts and tests import it; the engine does not.
"""
