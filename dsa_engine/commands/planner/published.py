"""Deployments whose operating points others have published, predicted from data sheets and the efficiencies of tuned
kernels, as these deployments do not run the kernels of this project.

Cards of Ascend 910C have two dies, which count as two devices here. If a report leaves something open (lengths,
drafts), ``known`` says what is assumed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dsa_engine.commands.planner.prediction.deployment import Deployment, Placed
from dsa_engine.commands.planner.prediction.devices import DEVICES
from dsa_engine.commands.planner.prediction.efficiency import Efficiencies
from dsa_engine.commands.planner.prediction.predict import predict_decode, predict_prefill
from dsa_engine.config.model import ModelConfig
from dsa_engine.config.released import released_config
from dsa_engine.measure.report import format_table


@dataclass(frozen=True)
class PublishedFigure:
    """One published figure in milliseconds: time to first token, time of a prefill, or time per output token.

    Attributes:
        requests: in decode, those of all cards; in prefill, those of a context-parallel group, one after the other.
        bound: the figure is an upper bound ("under 2 s").
        why: the likely reason of the gap between prediction and report.
    """

    name: str
    model: str
    device: str
    phase: str
    how: Deployment
    requests: int
    context: int
    published: float
    bound: bool
    known: str
    why: str
    tokens_per_step: float = 1.0

    def predicted(self) -> float:
        """Milliseconds."""
        config = ModelConfig.from_dict(released_config(self.model))
        placed, reached = Placed(config, DEVICES[self.device], self.how), Efficiencies.of_tuned_kernels()
        if self.phase == "prefill":
            return predict_prefill(placed, reached, self.context, self.requests).ttft * 1e3
        step = predict_decode(placed, reached, self.requests, self.context, self.tokens_per_step, self.context)
        return step.tpot * 1e3

    def to_json(self) -> dict[str, Any]:
        predicted = self.predicted()
        return asdict(self) | {"predicted": predicted, "ratio": predicted / self.published}


_A3 = "cann-recipes-infer, DeepSeek-V3.2-Exp guide"
_R1 = "cann-recipes-infer, DeepSeek-R1 decode"
_REPORT = "Huawei's V3/R1 inference report, 2025"

POINTS = (
    PublishedFigure(
        "V3.2 BF16, 64 cards, 128K: TTFT", "deepseek_v32", "910C-die", "prefill",
        Deployment(128, 128, 8, weights="bfloat16"), 1, 131_072, 2000, True, _A3,
        "a bound; host time between launches and uneven experts are not predicted",
    ),
    PublishedFigure(
        "V3.2 BF16, 64 cards, 128K: TPOT", "deepseek_v32", "910C-die", "decode",
        Deployment(128, 1, 8, weights="bfloat16", dispatch="all_to_all", drafts=1), 128, 131_072, 30, True,
        f"{_A3}; one request a die and one draft at 70% are assumed", "a bound; as above",
        1.7,
    ),
    PublishedFigure(
        "V3.2 W8A8C8, 64 cards, 128K, batch 128: TPOT", "deepseek_v32", "910C-die", "decode",
        Deployment(128, 1, 8, weights="int8", cache="fp8", dispatch="all_to_all", drafts=1), 128, 131_072, 18.85, False,
        f"{_A3}; one draft at 70% is assumed; its caches are INT8, of as many bytes",
        "no gap to speak of: waits between ranks are not predicted, an exchange of counts is",
        1.7,
    ),
    PublishedFigure(
        "V3.2 W8A8C8, 64 cards, 128K, batch 512: TPOT", "deepseek_v32", "910C-die", "decode",
        Deployment(128, 1, 8, weights="int8", cache="fp8", dispatch="all_to_all", drafts=1), 512, 131_072, 25.8, False,
        f"{_A3}; as above", "waits between ranks are not predicted; reads of four requests compete for the memory",
        1.7,
    ),
    PublishedFigure(
        "R1 W8A8C8, 64 cards, 4K, batch 6,144: TPOT", "deepseek_v3", "910C-die", "decode",
        Deployment(128, 1, 8, weights="int8", cache="fp8", dispatch="all_to_all", drafts=1, balanced=True),
        6144, 4096, 44.9, False, f"{_R1}; one draft, 70% accepted, perfect balance",
        "their attention kernels and overlap of dispatch with experts are better; no exchange of counts of its own",
        1.7,
    ),
    PublishedFigure(
        "V3/R1 INT8, 32 cards, 2K + 2K, 72 requests a card: TPOT", "deepseek_v3", "910B", "decode",
        Deployment(32, 1, 8, weights="int8", dispatch="all_to_all", drafts=1), 72 * 32, 3072, 99.6, False,
        f"{_REPORT}; one draft, 70% accepted", "no gap to speak of",
        1.7,
    ),
    PublishedFigure(
        "V3/R1 INT8, 16 cards, 8 × 2K: prefill", "deepseek_v3", "910B", "prefill",
        Deployment(16, 16, 8, weights="int8", chunk=2048), 8, 2048, 631, False, f"{_REPORT}; divided evenly",
        "the 8 prompts run together there; here one by one, each with its weights and launches",
    ),
    PublishedFigure(
        "V3/R1 INT8, 144 cards, 96 requests a card: TPOT", "deepseek_v3", "910C-die", "decode",
        Deployment(256, 1, 8, weights="int8", dispatch="all_to_all", drafts=1), 96 * 128, 4096, 50, False,
        f"{_REPORT}: 1,920 tokens/s a card at 50 ms; 256 of the 288 dies, as the experts divide; 4K, 70% assumed",
        "two micro-batches hide communication there; here all of it is waited for, counts (15%) included",
        1.7,
    ),
)  # fmt: skip


def published_table() -> str:
    """A table of predicted over published figures, with the likely reason of each gap."""
    rows, reasons = [], []
    for point in POINTS:
        predicted = point.predicted()
        reported = f"{'under ' if point.bound else ''}{point.published:g}"
        rows.append((point.name, reported, f"{predicted:.1f}", f"{predicted / point.published:.2f}"))
        reasons.append(f"* {point.name}: {point.why} ({point.known})")
    table = format_table(("published", "ms", "predicted ms", "ratio"), rows)
    return "\n".join((table, "", "Likely reasons of the gaps:", *reasons))
