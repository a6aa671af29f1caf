"""The serving benchmark: requests that arrive over time, at the engine of this process or at a server."""
