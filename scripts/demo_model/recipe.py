"""Recipe of the shipped model: its configuration, and the phases and constants of its training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from dsa_engine.demo import trained_folder

SEED = 10


def model_config() -> dict[str, Any]:
    """The shipped model's ``config.json``; a new dictionary every time."""
    return json.loads((trained_folder() / "config.json").read_text(encoding="utf-8"))


# Highest learning rates, and the steps until they are reached.
MUON_RATE, ADAM_RATE, WARMUP_STEPS = 0.01, 0.004, 20
WEIGHT_DECAY = 0.1
MTP_WEIGHT = 0.3  # lambda of equation 25 in the DeepSeek-V3 report, its value for most of the training
BALANCE_SPEED = 0.002  # change of the router's correction bias per step


@dataclass(frozen=True)
class Phase:
    """Some steps of the same kind.

    Attributes:
        kind: kind of attention, see :class:`demo_model.attention.Mode`; in "warmup" only the indexers learn.
        steps: number of optimiser steps.
        batch: documents per step.
        length: tokens per document.
        topk: number of tokens that a query attends to in a sparse phase.
        rate: learning rate of the main model as a fraction of the highest, at the phase's start and at its end.
        index_rate: the same for the indexers.
        guide: weight of the guided heads' loss (:mod:`demo_model.guides`), at the start and at the end.
        plain: fraction of documents that are text only.
        restate: fraction of the other documents that state facts a second time instead of asking for them.
        spacing: minimum and maximum tokens of text and facts per fact.
        jumps: whether positions have gaps, so that short documents have long distances.
        echo: fraction of the documents with questions that only repeat random numbers.
        mtp: whether the MTP module learns too.
    """

    name: str
    kind: str
    steps: int
    batch: int
    length: int
    topk: int = 0
    rate: tuple[float, float] = (1.0, 1.0)
    index_rate: tuple[float, float] = (0.0, 0.0)
    guide: tuple[float, float] = (0.0, 0.0)
    plain: float = 0.25
    restate: float = 0.2
    spacing: tuple[float, float] = (14.0, 200.0)
    jumps: bool = True
    echo: float = 0.0
    mtp: bool = True


# Documents of 64 tokens first: with them the model learns within a few hundred steps to find a fact. Then longer ones,
# the indexers' warm-up, and sparse attention, first with a small ``topk`` at short lengths, then with the model's own.
FACTS: dict[str, Any] = {"echo": 0.4, "plain": 0.0, "restate": 0.5, "spacing": (6.5, 9.0), "jumps": False, "mtp": False}
SHORT: dict[str, Any] = {"echo": 0.1, "plain": 0.2, "spacing": (8.0, 30.0), "jumps": False}
CROWDED: dict[str, Any] = {"plain": 0.15, "restate": 0.1, "spacing": (8.0, 60.0)}  # as many facts as 16K tokens have
PHASES = (
    Phase("facts", "dense", 240, 32, 64, guide=(1.0, 1.0), **FACTS),
    Phase("short", "dense", 200, 32, 128, guide=(1.0, 0.0), **SHORT),
    Phase("middle", "dense", 250, 8, 512, rate=(1.0, 0.6)),
    Phase("warm-up", "warmup", 40, 4, 1024, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", "sparse", 100, 4, 1024, 64, rate=(0.6, 0.3), index_rate=(1.0, 0.5)),
    Phase("crowded", "sparse", 90, 2, 2048, 128, rate=(0.5, 0.3), index_rate=(0.6, 0.4), **CROWDED),
    Phase("finer", "sparse", 80, 2, 2048, 256, rate=(0.3, 0.1), index_rate=(0.4, 0.2), **CROWDED),
    Phase("long", "sparse", 20, 1, 4096, 256, rate=(0.1, 0.05), index_rate=(0.2, 0.1), **CROWDED),
    Phase(
        "longest", "sparse", 4, 1, 8192, 256, rate=(0.05, 0.01), index_rate=(0.1, 0.05), plain=0.0, spacing=(14.0, 60.0)
    ),
    Phase("settling", "sparse", 80, 2, 2048, 256, rate=(0.2, 0.01), index_rate=(0.2, 0.02), **CROWDED),
)
