"""dsa_engine: inference of models with DeepSeek Sparse Attention over very long contexts."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dsa_engine.config import vllm_options
from dsa_engine.version import __version__

if TYPE_CHECKING:
    from dsa_engine.errors import CapacityError, CheckpointError
    from dsa_engine.inputs import TextPrompt, TokensPrompt
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
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# Names are imported when they are first used: torch takes seconds, and `dsa-engine --help` needs none of it.
_MODULES = {
    "errors": ("CapacityError", "CheckpointError"),
    "inputs": ("TextPrompt", "TokensPrompt"),
    "llm": ("LLM",),
    "outputs": ("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "SpeculationMetrics", "StreamPiece"),
    "parallel": ("ParallelConfig",),
    "sampling_params": ("SamplingParams",),
}
_MODULE_OF = {name: f"dsa_engine.{module}" for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value
    if vllm_options.advice(name) is None and find_spec(f"dsa_engine.{name}"):  # as if all modules had been imported
        return import_module(f"dsa_engine.{name}")
    vllm_options.absent(__name__, name)


sys.meta_path.append(vllm_options)  # the last: it is asked for what no other finds


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
