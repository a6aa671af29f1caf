"""dsa_engine: inference of models with DeepSeek Sparse Attention over very long contexts."""

from dsa_engine.errors import CapacityError, CheckpointError
from dsa_engine.llm import LLM
from dsa_engine.outputs import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
    StreamPiece,
)
from dsa_engine.parallel import ParallelConfig
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.version import __version__

__all__ = [
    "LLM",
    "CapacityError",
    "CheckpointError",
    "CompletionOutput",
    "Logprob",
    "ParallelConfig",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculationMetrics",
    "StreamPiece",
    "__version__",
]
