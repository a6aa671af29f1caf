"""Checks that the ranks of a run agree: on their options when they start, and on every call."""

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

# Options that may differ from rank to rank, as they change no result.
_MAY_DIFFER = ("model", "device", "progress", "trust_remote_code")
_FOLLOWS = "follow"  # the text of a rank that makes no calls
# Files of a model folder, beside its weights, that affect results.
MODEL_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def start_facts(folder: Path, options: EngineOptions) -> dict[str, str]:
    """Texts by name that must be the same on every rank: options, the model's files and the package's version."""
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


class CallsDiffer(ValueError):
    """The ranks are in different calls.

    Attributes:
        next_id: the number of the next request on all ranks, after those of rank 0's call; None if that makes none.
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
    """Compares the calls that all ranks are in; the ranks of a run must make the same calls.

    Args:
        params: sampling parameters of each prompt; empty if nothing is sampled.
        check: called now and then during the wait for other ranks; raises when there is nothing to wait for.
        ids: ids of the requests that the call makes, ascending.

    Returns:
        whether all other ranks follow this one (:func:`declare_following`), which then calls without agreement.

    Raises:
        CallsDiffer: the calls differ; raised on all ranks, and says how and on which ranks.
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

    def difference(calls: Mapping[int, str]) -> str:
        nonlocal follow
        followers = [rank for rank, call in calls.items() if call == _FOLLOWS]
        if followers:
            follow = len(followers) == len(calls) - 1
            return "" if follow else f"rank(s) {_listed(followers)} follow rank 0, and others call for themselves"
        for what, digest in json.loads(mine).items():
            others = [rank for rank, call in calls.items() if json.loads(call)[what] != digest]
            if others:
                return f"rank(s) {_listed(others)} were given other {what} than rank 0"
        return ""

    def judge(calls: Mapping[int, str]) -> str:
        return json.dumps([difference(calls), ids[-1] + 1 if ids else None])

    meeting = Meeting(mesh.run_ranks, mesh.run_rank)
    verdict, next_id = json.loads(meeting.hold(mine, judge, mesh.config.timeout, check))
    if verdict:
        error = CallsDiffer(
            f"{verdict}; give every rank the same prompts and sampling parameters, in the same order of calls: each "
            "gets all outputs. Or let all ranks but rank 0 follow()"
        )
        error.next_id = next_id
        raise error
    return follow


def declare_following(mesh: Mesh) -> None:
    """Tells rank 0, which learns it in its next call, that this rank makes no calls."""
    meeting = Meeting(mesh.run_ranks, mesh.run_rank)
    meeting.say(_FOLLOWS)
    meeting.leave()  # rank 0 holds it once, in its next call; a later engine of this run has meetings of its own


def others_follow(mesh: Mesh, check: Callable[[], None]) -> bool:
    """Whether all other ranks have declared to follow rank 0; called on rank 0, and waits for their texts.

    Raises:
        TimeoutError: a rank leaves no text.
    """
    meeting = Meeting(mesh.run_ranks, mesh.run_rank)
    follow = all(text == _FOLLOWS for text in meeting.texts(mesh.config.timeout, check).values())
    if follow:
        meeting.leave()
    return follow


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _plain(value: Any) -> Any:
    return vars(value) if dataclasses.is_dataclass(value) else repr(value)
