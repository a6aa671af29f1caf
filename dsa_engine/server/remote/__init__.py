"""The HTTP server in a process of its own: messages between it and the process of the engine."""
