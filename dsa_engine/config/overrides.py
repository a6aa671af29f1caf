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


_ROPE = ("rope_scaling", "rope_parameters", "rope_theta")
# Names of the same thing: an override of one drops the others, even those that would be read first.
_ALIASES: tuple[set[str], ...] = (
    {"dtype", "torch_dtype"},
    {"mlp_layer_types", "first_k_dense_replace"},
)
_INDEXER_SCHEDULES = ("indexer_types", "index_topk_pattern", "index_topk_freq")  # in order of precedence


def overridden(raw: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """``raw`` with overrides: nested dictionaries are merged, and RoPE's under both of their names."""
    dropped = {name for names in _ALIASES if names & overrides.keys() for name in names - overrides.keys()}
    for i, name in enumerate(_INDEXER_SCHEDULES):
        if name in overrides:
            dropped |= set(_INDEXER_SCHEDULES[:i]) - overrides.keys()
    remaining = {key: value for key, value in raw.items() if key not in dropped}
    base, given = _rope(raw), _rope(overrides)
    if base is None or given is None or not overrides.keys() & {*_ROPE}:
        return merge_overrides(remaining, overrides)
    if None in (overrides.get(name, given) for name in _ROPE[:2]):  # no scaling
        base = {key: value for key, value in base.items() if key == "rope_theta"}
    if "factor" in given and (base | given).get("rope_type", "default") == "default":
        advice = "give rope_type 'yarn' and original_max_position_embeddings with it"
        raise ValueError(f"hf_overrides: a factor of RoPE changes nothing where its type is 'default'; {advice}")
    merged = merge_overrides(remaining, overrides)
    return {key: value for key, value in merged.items() if key not in _ROPE} | {"rope_parameters": base | given}


def _rope(keys: dict[str, Any]) -> dict[str, Any] | None:
    """The keys of RoPE, those of ``rope_parameters`` first; None if they are not as they should be."""
    parts = [keys.get(name) or {} for name in _ROPE[:2]]
    if not all(isinstance(part, dict) for part in parts):
        return None
    theta = {} if keys.get("rope_theta") is None else {"rope_theta": keys["rope_theta"]}
    rope = theta | parts[0] | parts[1]
    kind = rope.pop("type", None)  # the older name counts where there is no other
    return rope | ({} if kind is None or rope.get("rope_type") is not None else {"rope_type": kind})


def refuse_unknown(overrides: dict[str, Any], known: set[str]) -> None:
    """Raises ``ValueError`` for an override of a key that is neither in the file nor read: it would change nothing."""
    for key in overrides:
        if key not in known and key not in _ROPE:
            near = difflib.get_close_matches(str(key), known, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"hf_overrides: no model configuration has a key {key!r}{meant}")
