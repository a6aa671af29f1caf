"""Sampling parameters: how the tokens of a request are chosen, and what its output contains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

from dsa_engine.config.checks import NOT_EMPTY, Fraction, PositiveInt, Seed, TokenId, at_least, check_text, shown
from dsa_engine.config.fields import Options, documented, option
from dsa_engine.config.structured_outputs import StructuredOutputsParams
from dsa_engine.config.vllm_options import absent, answer

__getattr__ = partial(absent, __name__)
__all__ = ["SamplingParams", "StructuredOutputsParams"]
MAX_OUTPUTS = 4096  # for one prompt
_MAX_SELECTION = 256  # tokens; a token of a large model takes a megabyte
_MAX_CHARACTERS = 1024  # of a stop string or a bad word
# Entries that each step, each token or each output of a request goes through.
_MAX_ENTRIES = {"stop": 512, "stop_token_ids": 512, "bad_words": 512, "logit_bias": 512, "allowed_token_ids": 4096}

# What a request asks of the sampler beyond its most likely token, see `SamplingParams.asks`.
NEEDS_HOST, DRAWS, MIN_P, TOP_P, PENALISES, HAS_GRAMMAR, RECORDS, HAS_BUDGET = (1 << bit for bit in range(8))

String = Annotated[str, NOT_EMPTY]
Penalty = Annotated[float, at_least(-2, 2)]
Count = Annotated[int, at_least(0)]
CountOrAll = Annotated[int, at_least(-1)]
Bias = Annotated[float, at_least(-100, 100)]


@documented
@dataclass
class SamplingParams(Options):
    """How to choose the tokens of a request, and what its output contains; names and meanings as in vLLM.

    Logits are changed in this order: ``allowed_token_ids``, ``bad_words``, ``min_tokens``, ``logit_bias``, penalties,
    ``structured_outputs``, temperature. Then ``min_p``, ``top_k`` and ``top_p`` select the tokens to draw from. A
    parameter may be assigned later (``params.max_tokens = 64``); this does not change requests already made.
    """

    n: Annotated[int, at_least(1, MAX_OUTPUTS)] = option(
        1,
        "outputs for the prompt, each computed separately; with a seed, output i, from 0, has the seed + i.",
    )
    presence_penalty: Penalty = option(
        0.0, "subtracted from the logit of every token that the output contains, from -2 to 2."
    )
    frequency_penalty: Penalty = option(0.0, "the same, times the number of occurrences in the output, from -2 to 2.")
    repetition_penalty: Annotated[float, at_least(0.001, 1000)] = option(
        1.0,
        "divides the logit of every token in prompt or output if it is above 0, and multiplies it otherwise.",
    )
    temperature: Annotated[float, at_least(0)] = option(
        1.0, "0 takes the most likely token; a positive value divides logits."
    )
    top_p: Fraction = option(
        1.0,
        "sample from the most likely tokens whose probabilities sum to this, in (0, 1].",
    )
    top_k: CountOrAll = option(0, "sample from this many most likely tokens; 0 or -1 for all.")
    min_p: Annotated[float, at_least(0, 1)] = option(
        0.0,
        "sample from tokens that are at least this many times as likely as the most likely one, in [0, 1]; comes "
        "before top_k, and top_k before top_p.",
    )
    max_tokens: PositiveInt | None = option(
        16,
        "maximum number of generated tokens; None: as many as max_model_len allows.",
    )
    min_tokens: Count = option(0, "no end-of-sequence token, stop token or stop string before this many.")
    thinking_token_budget: CountOrAll | None = option(
        None, "a thought, from <think> on, has at most this many tokens before </think>; None or -1: any number."
    )
    stop: String | list[String] | None = option(
        None, "strings that end the text; up to 512, of up to 1024 characters each."
    )
    stop_token_ids: list[TokenId] | None = option(
        None, "token ids that end the output, besides the model's end-of-sequence tokens; up to 512."
    )
    include_stop_str_in_output: bool = option(
        False, "the text keeps the stop string, or the text of the stop token, that ended it."
    )
    ignore_eos: bool = option(False, "go on after an end-of-sequence token.")
    allowed_token_ids: Annotated[list[TokenId], NOT_EMPTY] | None = option(
        None, "only these tokens are generated; up to 4096."
    )
    logit_bias: dict[TokenId, Bias] | None = option(
        None, "token id -> a number from -100 to 100 that is added to its logit; up to 512."
    )
    bad_words: list[String] | None = option(
        None,
        "words that are not generated, up to 512: the last token of a word is forbidden after its other tokens.",
    )
    structured_outputs: StructuredOutputsParams | None = option(
        None, "the form that the output must have, a StructuredOutputsParams or a dictionary of its fields."
    )
    seed: Seed | None = option(
        None,
        "makes the request reproducible in any batch; default: derived from the engine's seed.",
    )
    logprobs: CountOrAll | None = option(
        None,
        "for each output token, return the log-probabilities of this many most likely tokens and of the sampled one; "
        "0: of the sampled one only, -1: of all tokens, None: none.",
    )
    prompt_logprobs: CountOrAll | None = option(None, "the same for each token of the prompt but the first.")
    selection: Annotated[int, at_least(0, _MAX_SELECTION)] = option(
        0,
        "for this many first output tokens, return which tokens every layer selected and their attention weights, see "
        "outputs.Selection; up to 256. Steps that record are run kernel by kernel. Tokens stay the same.",
    )
    detokenize: bool = option(True, "decode the output to text.")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text.")
    stop_strings: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        for name, limit in _MAX_ENTRIES.items():
            given = getattr(self, name)
            if isinstance(given, (list, tuple, dict)) and len(given) > limit:
                raise ValueError(f"{name} has {len(given)} entries, of at most {limit}; give fewer")
        super().__post_init__()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop_strings", stop)
        for name, texts in (("stop", stop), ("bad_words", self.bad_words or ())):
            for text in texts:
                if len(text) > _MAX_CHARACTERS:
                    raise ValueError(
                        f"{name} has a text of {len(text)} characters, of at most {_MAX_CHARACTERS}; give a shorter one"
                    )
                check_text(f"a text of {name}", text)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must lie in 0 … max_tokens ({self.max_tokens}), not {shown(self.min_tokens)}")
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError("structured_outputs says where an output ends; leave min_tokens and ignore_eos out")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 with temperature 0, where all outputs would be equal, not {self.n}")
        if self.seed is not None and self.seed + self.n > 2**64:
            raise ValueError(f"seed + n must be at most 2**64: each output has another seed; not seed {self.seed}")
        if stop and not self.detokenize:
            raise ValueError(f"stop strings need detokenize=True: they are searched in the text; not {shown(stop)}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks an assigned value, as the constructor does."""
        if "stop_strings" in vars(self):  # set last in the constructor
            vars(self).update(vars(replace(self, **{name: value})))
        else:
            object.__setattr__(self, name, value)

    @classmethod
    def answer(cls, name: str, value: Any) -> str | None:
        return answer(name, value)

    @property
    def penalises(self) -> bool:
        """Whether logits depend on earlier tokens."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def asks(self) -> int:
        """What it asks of the sampler, ``NEEDS_HOST`` and its neighbours added up; without ``min_tokens``, which asks
        for the host only at first."""
        asks = PENALISES * self.penalises + HAS_GRAMMAR * (self.structured_outputs is not None)
        asks += RECORDS * (self.selection > 0) + HAS_BUDGET * (self.thinking_token_budget not in (None, -1))
        if self.logprobs is not None or self.allowed_token_ids or self.logit_bias or self.bad_words:
            asks += NEEDS_HOST
        if self.temperature > 0:
            asks += DRAWS + MIN_P * (self.min_p > 0) + TOP_P * (self.top_p < 1)
        return asks

    @property
    def num_best(self) -> int:
        """Number of most likely tokens from which one is drawn; 0: all, or none is drawn."""
        return max(0, self.top_k) if self.temperature > 0 else 0
