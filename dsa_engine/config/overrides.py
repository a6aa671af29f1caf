"""Overrides of ``config.json`` for one run (``hf_overrides``)."""

from __future__ import annotations

import difflib
from typing import Any


def merge_overrides(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``base`` with keys replaced by those of ``overrides``; nested dictionaries are merged."""
    merged = dict(base)
    for key, value in overrides.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_overrides(merged[key], value) if nested else value
    return merged


# Names of the same thing: an override of one drops the others, even those that would be read first.
_ALIASES: tuple[set[str], ...] = (
    {"dtype", "torch_dtype"},
    {"mlp_layer_types", "first_k_dense_replace"},
    {"rope_parameters", "rope_scaling"},
)
_INDEXER_SCHEDULES = ("indexer_types", "index_topk_pattern", "index_topk_freq")  # in order of precedence


def without_aliases(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``raw`` without the keys that the overrides give under another name."""
    dropped = {name for names in _ALIASES if names & overrides.keys() for name in names - overrides.keys()}
    for i, name in enumerate(_INDEXER_SCHEDULES):
        if name in overrides:
            dropped |= set(_INDEXER_SCHEDULES[:i]) - overrides.keys()
    remaining = {key: value for key, value in raw.items() if key not in dropped}
    parameters = raw.get("rope_parameters")
    theta = parameters.get("rope_theta") if isinstance(parameters, dict) else None
    if "rope_theta" in overrides and "rope_parameters" in remaining:
        if isinstance(parameters, dict):
            remaining["rope_parameters"] = {k: v for k, v in parameters.items() if k != "rope_theta"}
    elif "rope_parameters" in dropped and theta is not None:
        remaining.setdefault("rope_theta", theta)  # rope_scaling does not hold it
    return remaining


def refuse_unknown(overrides: dict[str, Any], known: set[str]) -> None:
    """Raises ``ValueError`` for an override of a key that is neither in the file nor read: it would change nothing."""
    for key in overrides:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"hf_overrides: no model configuration has a key {key!r}{meant}")
