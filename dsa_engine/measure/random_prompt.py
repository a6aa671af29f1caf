"""Random prompts, to measure with."""

from __future__ import annotations

import random

from dsa_engine.engine.engine import Engine


def random_prompt(engine: Engine, length: int, seed: int = 0) -> list[int]:
    """``length`` random token ids."""
    rng = random.Random(seed)
    return [rng.randrange(engine.config.vocab_size) for _ in range(length)]
