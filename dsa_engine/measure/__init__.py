"""Measurement: stage times, memory, counted work, one emulated rank of a large world; the engine does not import it."""
