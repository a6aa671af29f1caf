"""What must be the same on every rank when an engine starts."""

from __future__ import annotations

import dataclasses
import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dsa_engine.options import EngineOptions
from dsa_engine.version import __version__
from dsa_engine.weights.index import fingerprint

# Options that may differ from rank to rank, as they change no result.
_MAY_DIFFER = ("model", "device", "progress", "trust_remote_code")
# Files of a model folder, beside its weights, that affect results.
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def start_facts(folder: Path, options: EngineOptions) -> dict[str, str]:
    """Texts by name that must be the same on every rank: options, the model's files and the package's version.

    Of the weights these are the index, names and sizes of the files, and 17 samples of 4 KiB of each: another version
    is noticed, a byte that is damaged on one rank between the samples is not.
    """
    facts = {"the version of dsa_engine": __version__}
    for name, value in vars(options).items():
        if name == "parallel":
            facts |= {part: repr(own) for part, own in vars(value).items() if part not in ("ranks", "expert_loads")}
            facts["expert_loads"] = _content(value.expert_loads)
            facts["expert_loads of decode_options"] = _content(options.decode_options.get("expert_loads"))
        elif name not in _MAY_DIFFER:
            facts[name] = json.dumps(value, sort_keys=True, default=_plain)
    for name in MODEL_FILES:
        facts[name] = _content(folder / name)
    if options.load_format != "dummy":
        facts["the checkpoint's files"] = fingerprint(folder)
    return facts


def _content(path: Any) -> str:
    """A digest of a file; of another value its text."""
    if not isinstance(path, (str, Path)):
        return repr(path)
    return blake2b(Path(path).read_bytes(), digest_size=8).hexdigest() if Path(path).is_file() else "not there"


def _plain(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else repr(value)
