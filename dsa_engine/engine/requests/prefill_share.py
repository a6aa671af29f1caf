"""How often steps prefill while any request decodes."""

from __future__ import annotations


class PrefillShare:
    """Lets at most a fraction of the steps prefill that are taken while any request decodes.

    Every such step earns a part of a prefill step. What is earned and not used is capped at one step: a late request is
    prefilled at once, but no burst of prefills follows. A step counts once it has been launched.

    Args:
        maximum: the fraction, in (0, 1]; 1 puts prefill first.
    """

    def __init__(self, maximum: float):
        self._maximum = maximum
        self._credit = 0.0  # prefill steps that may be taken while any request decodes
        self._credit_after = 0.0  # the same after the step scheduled last

    def may_prefill(self, decoding: bool) -> bool:
        """Begins a step; returns whether it may prefill. ``decoding``: whether any request decodes."""
        self._credit_after = min(1.0, self._credit) + self._maximum if decoding else self._credit
        return not decoding or self._credit_after > 1 - 1e-9

    def prefills(self, decoding: bool) -> None:
        """Records that the step does prefill."""
        self._credit_after -= 1.0 if decoding else 0.0

    def launched(self) -> None:
        """Records that the step has been launched."""
        self._credit = self._credit_after
