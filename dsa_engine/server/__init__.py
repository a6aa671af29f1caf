"""The HTTP server: OpenAI's API in front of an :class:`dsa_engine.LLM` (``dsa-engine serve``)."""
