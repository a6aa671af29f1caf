"""Sampling parameters: how the tokens of one request are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How to choose the tokens of one request; names and meanings as in vLLM.

    Attributes:
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_p: sample from the most likely tokens that together have this probability, in (0, 1].
        top_k: sample from this many most likely tokens; 0 or -1 for all.
        min_p: sample from tokens that are at least this many times as likely as the most likely one, in [0, 1]; comes
            before top_k, and top_k before top_p.
        max_tokens: at most this many tokens are generated.
        min_tokens: no end-of-sequence token, stop token or stop string before this many.
        stop: strings that end the text; they are not part of it.
        stop_token_ids: token ids that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: go on after an end-of-sequence token.
        seed: makes the request reproducible whatever else is in the batch; default: from the engine's seed.
        logprobs: return the log-probabilities of this many most likely tokens and of the sampled one, for each output
            token; 0 for the sampled one alone, None for none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, (list, tuple)) or (name == "stop" and isinstance(value, str))):
                kinds = "a string or a list" if name == "stop" else "a list"
                raise ValueError(f"{name} must be {kinds}, not {value!r}")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop_strings", stop)
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ValueError(f"{name} must be a finite number, not {value!r}")
        for name in ("top_k", "max_tokens", "min_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} must be an integer, not {value!r}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must lie in [0, 1], not {self.min_p}")
        if self.top_k < -1:
            raise ValueError(f"top_k must be -1 or 0 (all tokens) or positive, not {self.top_k}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens must lie in 0 … max_tokens ({self.max_tokens}), not {self.min_tokens}")
        if not all(isinstance(s, str) and s for s in stop):
            raise ValueError(f"stop must be non-empty strings, not {self.stop!r}")
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ValueError(f"seed must be an integer, not {self.seed!r}")
        asked = self.logprobs
        if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < 0):
            raise ValueError(f"logprobs must be None, 0 (the sampled token) or a number of tokens, not {asked!r}")
        if not all(isinstance(t, int) and 0 <= t < 2**31 for t in self.stop_token_ids or ()):
            raise ValueError(f"stop_token_ids must be token ids, not {self.stop_token_ids!r}")
