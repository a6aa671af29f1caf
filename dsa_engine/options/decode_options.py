"""The options of the ranks that decode, where they differ from those of the ranks that prefill (``prefill_ranks``)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsa_engine.options.engine_options import EngineOptions

# What may differ: nothing that changes a token, a cache row or what callers may ask for.
_OF_ENGINE = (
    "cache_memory",
    "gpu_memory_utilization",
    "workspace",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_prefix_caching",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "async_scheduling",
    "overlap_shared_expert",
    "overlap_indexer",
    "enable_dbo",
    "dbo_decode_token_threshold",
)
_OF_RANKS = (
    "tp_size",
    "decode_dispatch",
    "moe_chunk_size",
    "redundant_experts",
    "route_shared_expert",
    "expert_loads",
    "record_expert_loads",
    "rebalance_every",
)
# What the ranks that prefill have alone: tiers hold pages of prompts, and two parts cannot write one file.
_OF_PREFILL = ("host_cache_memory", "kv_offloading_size", "cache_folder", "cache_folder_size")


def options_of_decode(options: EngineOptions) -> EngineOptions:
    """The options that are in force on the ranks that decode.

    Raises:
        TypeError, ValueError: ``decode_options`` names an option that the parts share, or a value that is not possible.
    """
    own = options.decode_options
    if unknown := [name for name in own if name not in (*_OF_ENGINE, *_OF_RANKS)]:
        raise ValueError(
            f"decode_options: {unknown[0]!r} cannot differ between the ranks that prefill and those that decode; "
            f"options that can are {', '.join((*_OF_ENGINE, *_OF_RANKS))}"
        )
    if own and options.parallel.prefill_ranks is None:
        raise ValueError(
            "decode_options are those of the ranks that decode, with prefill_ranks; give that too, or leave them out"
        )
    of_ranks: dict[str, Any] = {"record_expert_loads": None} | {name: own[name] for name in _OF_RANKS if name in own}
    of_engine: dict[str, Any] = dict.fromkeys(_OF_PREFILL) | {name: own[name] for name in _OF_ENGINE if name in own}
    try:
        parallel = replace(options.parallel, **of_ranks)
        return replace(options, parallel=parallel, decode_options={}, **of_engine)
    except (TypeError, ValueError) as error:
        raise type(error)(f"decode_options: {error}") from error
