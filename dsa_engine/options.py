"""The options of the engine, checked before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from dsa_engine.model.config import DTYPES
from dsa_engine.parallel import ParallelConfig
from dsa_engine.sizes import parse_bytes

LoadFormat = Literal["auto", "dummy"]


@dataclass(frozen=True)
class EngineOptions:
    """The options of :class:`dsa_engine.LLM`, which says what they mean.

    Raises:
        TypeError, ValueError: an option is not possible; the text says what is.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    max_prefill_share: float = 0.5
    page_size: int = 64
    cache_memory: int | str | None = None
    workspace: int | str | None = None
    load_format: LoadFormat = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    enforce_eager: bool = False
    async_scheduling: bool = True
    overlap_shared_expert: bool = True
    overlap_indexer: bool = True
    seed: int = 0
    progress: bool = True

    def __post_init__(self) -> None:
        for name, kind in (("dtype", str), ("device", str), ("hf_overrides", dict), ("parallel", ParallelConfig)):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, not {getattr(self, name)!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed must be an integer, not {self.seed!r}")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.load_format not in get_args(LoadFormat):
            raise ValueError(f"load_format must be one of {', '.join(get_args(LoadFormat))}, not {self.load_format!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "page_size"):
            value = getattr(self, name)
            if value is None and name == "max_model_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
        for name in ("enforce_eager", "async_scheduling", "overlap_shared_expert", "overlap_indexer", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, not {getattr(self, name)!r}")
        share = self.max_prefill_share
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"max_prefill_share must be a number in (0, 1], not {share!r}; 1 puts prefill first")
        for name in ("cache_memory", "workspace"):
            if getattr(self, name) is not None:
                parse_bytes(getattr(self, name), name)
