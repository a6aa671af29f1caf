"""What the ranks of a run must have in common, when they start and in every call."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from dsa_engine.checkpoint.index import fingerprint
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.version import __version__

# What may differ from machine to machine and rank to rank, and changes no result.
_OWN = ("model", "device", "progress", "trust_remote_code")
# Files of a model folder, beside its weights, that say what is computed.
_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def start_facts(folder: Path, options: EngineOptions) -> dict[str, str]:
    """Texts by name that have to be the same on every rank: options, the files of the model, and the package."""
    facts = {"the version of dsa_engine": __version__}
    for name, value in vars(options).items():
        if name == "parallel":
            facts |= {part: repr(own) for part, own in vars(value).items() if part != "ranks"}
        elif name not in _OWN:
            facts[name] = json.dumps(value, sort_keys=True, default=_plain)
    for name in _FILES:
        path = folder / name
        facts[name] = blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.is_file() else "not there"
    if options.load_format != "dummy":
        facts["the checkpoint's files"] = fingerprint(folder)
    return facts


def agree_on_call(
    mesh: Mesh,
    kind: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    together: AbstractContextManager[None] | None = None,
) -> None:
    """``ValueError`` on all ranks where they are in different calls: nothing good would come of them.

    Args:
        kind: of the call.
        prompts: token ids.
        params: of each prompt; empty where nothing is sampled.
        together: is entered while the ranks wait for each other.
    """
    if mesh.world_size == 1:
        return
    ids = b" ".join(array("q", prompt).tobytes() for prompt in prompts)
    lengths = repr([len(prompt) for prompt in prompts]).encode()
    texts = {"calls": kind.encode(), "prompts": lengths + ids, "sampling parameters": repr(params).encode()}
    digests = [int.from_bytes(blake2b(text, digest_size=7).digest(), "big") for text in texts.values()]
    with together or nullcontext():
        everybodys = mesh.world.all_gather(torch.tensor([digests], device=mesh.device)).tolist()
    for what, theirs in zip(texts, zip(*everybodys, strict=True), strict=True):
        others = [rank for rank, one in enumerate(theirs) if one != theirs[0]]
        if others:
            raise ValueError(
                f"rank(s) {', '.join(map(str, others))} were given other {what} than rank 0; give every rank the same "
                "prompts and sampling parameters, in the same order of calls: each gets all outputs"
            )


def _plain(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else repr(value)
