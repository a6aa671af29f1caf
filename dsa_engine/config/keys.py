"""Typed reading of ``config.json``: every value is checked, and every error names its key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from dsa_engine.config.checks import above as more_than
from dsa_engine.config.checks import at_least, check, is_integer, shown


class Keys:
    """The keys of a JSON object; one that is null counts as missing. ``within``: the key that holds it, for errors."""

    def __init__(self, raw: dict[str, Any], within: str = ""):
        self.raw = raw
        self.asked: set[str] = set()  # keys that were read
        self._within = within

    def get(self, key: str) -> Any:
        """The unchecked value; None if there is none."""
        self.asked.add(key)
        return self.raw.get(key)

    def size(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """An integer of at least ``minimum``; without a default the key must be there."""
        value: int = self._value(key, default)
        check(self.name(key), value, Annotated[int, at_least(minimum)])
        return value

    def number(self, key: str, default: float | None = None, *, above: float | None = 0.0) -> float:
        """A number above ``above``, or of at least 0 if that is None; without a default the key must be there."""
        value = self._value(key, default)
        check(self.name(key), value, Annotated[float, at_least(0) if above is None else more_than(above)])
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{self.name(key)} must be true or false, not {shown(value)}")
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """One of ``allowed``; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{self.name(key)} {shown(value)} is not supported; supported are {', '.join(allowed)}")
        return value

    def part(self, key: str) -> Keys:
        """The keys of a nested object; no keys if it is missing."""
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{self.name(key) if self._within else key} must be a JSON object, not {shown(value)}")
        return Keys(value or {}, f"{self._within}.{key}" if self._within else key)

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """A token id or a list of them; empty if the key is missing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for i in ids:
            if not is_integer(i) or not 0 <= i < vocab_size:
                raise ValueError(
                    f"{self.name(key)} must be token ids 0 … {vocab_size - 1} (vocab_size), not {shown(value)}"
                )
        return tuple(ids)

    def per_layer(self, key: str, layers: int, allowed: Sequence[str]) -> tuple[str, ...]:
        """A list with one of ``allowed`` for each layer, cut to ``layers``, as an override of ``num_hidden_layers``
        keeps the first layers."""
        values = self.get(key)
        if not isinstance(values, (list, str)):
            raise ValueError(
                f"{key} must be a list with one of {', '.join(allowed)} for each layer, not {shown(values)}"
            )
        if len(values) < layers:
            raise ValueError(f"{key} names {len(values)} layers, num_hidden_layers is {layers}")
        for value in values:
            if value not in allowed:
                raise ValueError(f"{key}: {shown(value)} is not supported; supported are {', '.join(allowed)}")
        return tuple(values[:layers])

    def name(self, key: str) -> str:
        """The name of a key in errors."""
        return f"config.json: {self._within}.{key}" if self._within else f"config.json: {key!r}"

    def refuse_unread(self, neutral: Mapping[str, tuple[Any, ...]] | None = None) -> None:
        """Raises ``ValueError`` for a key that was not read, as it might change what the others mean. ``neutral``: by
        key, values that change nothing, as null does; (): all values."""
        for key, value in self.raw.items():
            allowed = (neutral or {}).get(key)
            if key in self.asked or value is None or allowed == () or value in (allowed or ()):
                continue
            supported = f"supported are {', '.join(map(repr, allowed))}" if allowed else "nothing reads this key"
            raise ValueError(f"{self.name(key)} {shown(value)} is not supported: {supported}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.get(key)
        if value is not None:
            return value
        if default is None:
            model = f", which a {self.raw['model_type']} model needs" if "model_type" in self.raw else ""
            raise ValueError(f"config.json lacks {key!r}{model}")
        return default
