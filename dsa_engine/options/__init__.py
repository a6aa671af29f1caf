"""All options of the engine, and which of them may differ where prompts are prefilled apart from decode."""

from dsa_engine.options.decode_options import options_of_decode
from dsa_engine.options.engine_options import EngineOptions, Quantization

__all__ = ["EngineOptions", "Quantization", "options_of_decode"]
