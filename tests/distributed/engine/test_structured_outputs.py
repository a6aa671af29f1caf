"""Structured outputs on 2 ranks are those of one: masks are made where a request is owned, and its tokens go to all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

OPTIONS = {"device": "cpu", "max_model_len": 256, "page_size": 8, "cache_memory": "8MiB", "progress": False}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
FORMS: list[Any] = [{"json": SCHEMA}, {"regex": "[a-f]{3,40}x"}, {"choice": ["yes", "no"]}, None]


def case(name: str, parallel: dict[str, Any], drafts: int = 0, **options: Any) -> dict[str, Any]:
    options = OPTIONS | options | ({"speculative_config": {"num_speculative_tokens": drafts}} if drafts else {})
    words = {key: key in name for key in ("ahead", "padded")} | {"preempts": "preempted" in name}
    return {"name": name, "folder": "demo-random", "parallel": parallel, "options": options, **words}


STATIC = {"decode_dispatch": "all_gather", "moe_dispatch": "all_gather"}
CASES = [
    case("divided prompts", {"cp_size": 2}),
    case("groups, preempted", STATIC | {"cp_size": 1}),
    case("heads, ahead", STATIC | {"cp_size": 2, "tp_size": 2}),
    case("drafts", {"cp_size": 2}, 2),
    case("drafts, padded, preempted", STATIC | {"cp_size": 2}, 3),
]


def test_two_ranks(
    rank_results: Callable[..., list[Any]],
    worker: SimpleNamespace,
    random_ids: Callable[..., list[int]],
    demo_cache: Path,
    tmp_path: Path,
) -> None:
    prompts = [random_ids(5 + 7 * i, seed=i) for i in range(8)]
    params = [
        {"temperature": i % 3 / 2, "seed": i, "max_tokens": 36, "structured_outputs": FORMS[i % len(FORMS)]}
        for i in range(8)
    ]
    generate = {"generate": [{"prompts": prompts, "params": params}]}
    alone = worker.run_case(case("alone", {}) | generate)
    assert [end for end, _ in alone["ends"][0][2::4]] == ["stop", "stop"]
    scripted = {"script": alone["tokens"][0]}
    cases = [one | generate | (scripted if "drafts" in one["name"] else {}) for one in CASES]
    first, second = rank_results(2, "worker.py", cases, tmp_path)
    for one in cases:
        name = one["name"]
        assert first[name]["tokens"] == second[name]["tokens"] == alone["tokens"], name
        assert first[name]["ends"] == alone["ends"], name
        assert (first[name]["launched_ahead"] > 10) == one["ahead"]
        assert (first[name]["preemptions"] > 0) == ("preempted" in name), name
        if "drafts" in name:
            assert len({number for number, _ in first[name]["drafts"].values()}) >= 3, "numbers of accepted drafts"
