"""The phases and constants of the training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEED = 10

# Highest learning rates, and the steps until they are reached.
MUON_RATE, ADAM_RATE, WARMUP_STEPS = 0.01, 0.004, 20
WEIGHT_DECAY = 0.1
MTP_WEIGHT = 0.3  # lambda of equation 25 in the DeepSeek-V3 report, its value for most of the training
BALANCE_SPEED = 0.002  # change of the router's correction bias per step


@dataclass(frozen=True)
class Phase:
    """Some steps of the same kind.

    Attributes:
        steps: number of optimiser steps.
        batch: documents per step.
        length: tokens per document.
        topk: None: dense attention; 0: dense, and the indexers learn; else sparse, to so many tokens.
        rate: learning rate of the main model as a fraction of the highest, at the phase's start and at its end.
        index_rate: the same for the indexers.
        guide: weight of the guided heads' loss (:func:`.training.guides_of`), at the start and at the end.
        plain: fraction of documents that are text only.
        spacing: minimum and maximum tokens of text and facts per fact.
        jumps: whether positions have gaps, so that short documents have long distances.
        echo: fraction of the documents with questions that only repeat random numbers.
        mtp: whether the MTP module learns too.
    """

    name: str
    steps: int
    batch: int
    length: int
    topk: int | None = None
    rate: tuple[float, float] = (1.0, 1.0)
    index_rate: tuple[float, float] = (0.0, 0.0)
    guide: tuple[float, float] = (0.0, 0.0)
    plain: float = 0.25
    spacing: tuple[float, float] = (14.0, 200.0)
    jumps: bool = True
    echo: float = 0.0
    mtp: bool = True


# Documents of 64 tokens first: with them the model learns within a few hundred steps to find a fact. Then longer ones,
# the indexers' warm-up, and sparse attention, first with a small ``topk`` at short lengths, then with the model's own.
FACTS: dict[str, Any] = {"echo": 0.4, "plain": 0.0, "spacing": (6.5, 9.0), "jumps": False, "mtp": False}
SHORT: dict[str, Any] = {"echo": 0.1, "plain": 0.2, "spacing": (8.0, 30.0), "jumps": False}
CROWDED: dict[str, Any] = {"plain": 0.15, "spacing": (8.0, 60.0)}  # as many facts as 16K tokens have
PHASES = (
    Phase("facts", 240, 32, 64, guide=(1.0, 1.0), **FACTS),
    Phase("short", 200, 32, 128, guide=(1.0, 0.0), **SHORT),
    Phase("middle", 250, 8, 512, rate=(1.0, 0.6)),
    Phase("warm-up", 40, 4, 1024, 0, rate=(0.0, 0.0), index_rate=(1.0, 1.0)),
    Phase("sparse", 100, 4, 1024, 64, rate=(0.6, 0.3), index_rate=(1.0, 0.5)),
    Phase("crowded", 90, 2, 2048, 128, rate=(0.5, 0.3), index_rate=(0.6, 0.4), **CROWDED),
    Phase("finer", 80, 2, 2048, 256, rate=(0.3, 0.1), index_rate=(0.4, 0.2), **CROWDED),
    Phase("long", 20, 1, 4096, 256, rate=(0.1, 0.05), index_rate=(0.2, 0.1), **CROWDED),
    Phase("longest", 4, 1, 8192, 256, rate=(0.05, 0.01), index_rate=(0.1, 0.05), plain=0.0, spacing=(14.0, 60.0)),
    Phase("settling", 80, 2, 2048, 256, rate=(0.2, 0.01), index_rate=(0.2, 0.02), **CROWDED),
)
