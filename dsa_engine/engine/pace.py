"""How long a prefill step may take while streams decode."""

from __future__ import annotations

_DECODE_STEPS = 8  # time of a prefill step without max_tpot, in decode steps
_SMOOTHING = 0.2  # weight of the newest decode step


class PrefillPace:
    """Measures decode and prefill steps as they run, and says how many tokens a prefill step may have.

    Rank 0 measures and tells the other ranks. What is measured are times between reads of tokens, since a device may be
    behind its host; so the cost of a prefill token contains the decode step beside it, and more with every chunk of a
    long prompt.

    Args:
        max_tpot: seconds between two tokens of a stream, prefill included; None: 8 decode steps for prefill.
        tokens: maximum number of tokens of a group's prefill step.
        least: the smallest useful number.

    Attributes:
        limit: tokens of a group's prefill step while streams decode: ``least`` times a power of two, or ``tokens``.
    """

    def __init__(self, max_tpot: float | None, tokens: int, least: int):
        self._max_tpot, self._tokens, self._least = max_tpot, tokens, min(least, tokens)
        self.limit = tokens
        self._decode: float | None = None  # seconds of a decode step
        self._token: float | None = None  # seconds of a prefill token
        self._since: float | None = None  # time of the last read
        self._prefilled = 0

    def begin(self, now: float) -> None:
        """A step begins; a time is measured from here if there was nothing to do before."""
        self._since = now if self._since is None else self._since

    def pause(self) -> None:
        """There is nothing to do."""
        self._since = None

    def read(self, now: float, prefilled: int) -> None:
        """Tokens have been read, and ``prefilled`` tokens of prompts computed so far, those of the fullest group."""
        assert self._since is not None, "begin() before each step"
        seconds, tokens = now - self._since, prefilled - self._prefilled
        self._since, self._prefilled = now, prefilled
        if tokens:
            self._token = seconds / tokens
        elif self._decode is None:
            self._decode = seconds
        else:
            self._decode += _SMOOTHING * (min(seconds, 2 * self._decode) - self._decode)
        if self._decode is None or self._token is None:
            return
        allowed = _DECODE_STEPS * self._decode if self._max_tpot is None else self._max_tpot - self._decode
        factor = max(1, int(allowed / (self._token * self._least)))
        self.limit = min(self._tokens, self._least << (factor.bit_length() - 1))
