"""What the ranks of a run must have in common, when they start and in every call."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dsa_engine.checkpoint.index import fingerprint
from dsa_engine.options import EngineOptions
from dsa_engine.parallel import Mesh
from dsa_engine.parallel.agreement import Meeting
from dsa_engine.sampling_params import SamplingParams
from dsa_engine.version import __version__

# What may differ from machine to machine and rank to rank, and changes no result.
_OWN = ("model", "device", "progress", "trust_remote_code")
_FOLLOWS = "follow"  # a rank's word in place of its call
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


class CallsDiffer(ValueError):
    """The ranks are in different calls.

    Attributes:
        next_id: of the next request on all ranks, after those of rank 0's call; None: rank 0's call makes none.
    """

    next_id: int | None = None


def agree_on_call(
    mesh: Mesh,
    kind: str,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    check: Callable[[], None] = lambda: None,
    ids: Sequence[int] = (),
) -> bool:
    """Compares the call that every rank is in; several ranks cannot serve different ones.

    Args:
        kind: of the call.
        prompts: token ids.
        params: of each prompt; empty where nothing is sampled.
        check: called now and then while the other ranks are waited for; raises where there is nothing to wait for.
        ids: of the requests that the call makes, ascending.

    Returns:
        whether all other ranks follow this one (:func:`leave_word_to_follow`), and it may call as it likes.

    Raises:
        CallsDiffer: on all ranks, where they are in different calls; says in what they differ, and which.
        TimeoutError: a rank does not come.
    """
    if mesh.processes.size == 1:
        return False
    tokens = b" ".join(array("q", prompt).tobytes() for prompt in prompts)
    lengths = repr([len(prompt) for prompt in prompts]).encode()
    texts = {"calls": kind.encode(), "prompts": lengths + tokens, "sampling parameters": repr(params).encode()}
    texts["calls before"] = str(ids[:1]).encode()
    mine = json.dumps({what: blake2b(text, digest_size=16).hexdigest() for what, text in texts.items()})
    follow = False

    def judge(words: Mapping[int, str]) -> str:
        nonlocal follow
        followers = [rank for rank, word in words.items() if word == _FOLLOWS]
        if followers:
            follow = len(followers) == len(words) - 1
            return "" if follow else f"rank(s) {_listed(followers)} follow rank 0, and others call for themselves"
        for what, theirs in json.loads(mine).items():
            others = [rank for rank, word in words.items() if json.loads(word)[what] != theirs]
            if others:
                return f"rank(s) {_listed(others)} were given other {what} than rank 0"
        return ""

    def judge_all(words: Mapping[int, str]) -> str:
        return json.dumps([judge(words), ids[-1] + 1 if ids else None])

    meeting = Meeting(mesh.global_ranks, mesh.global_ranks[mesh.rank])
    verdict, next_id = json.loads(meeting.hold(mine, judge_all, mesh.config.timeout, check))
    if verdict:
        error = CallsDiffer(
            f"{verdict}; give every rank the same prompts and sampling parameters, in the same order of calls: each "
            "gets all outputs. Or let all ranks but rank 0 follow()"
        )
        error.next_id = next_id
        raise error
    return follow


def leave_word_to_follow(mesh: Mesh) -> None:
    """Tells rank 0, in its next call, that this one makes none of its own."""
    Meeting(mesh.global_ranks, mesh.global_ranks[mesh.rank]).say(_FOLLOWS)


def others_follow(mesh: Mesh, check: Callable[[], None]) -> bool:
    """Whether all other ranks follow rank 0, as they say in its next call; asked on rank 0.

    Raises:
        TimeoutError: one says nothing.
    """
    meeting = Meeting(mesh.global_ranks, mesh.global_ranks[mesh.rank])
    return all(word == _FOLLOWS for word in meeting.texts(mesh.config.timeout, check).values())


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _plain(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else repr(value)
