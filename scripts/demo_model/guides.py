"""Targets for some attention heads in the first phases, so that the model learns within minutes to find a fact.

Without them a small model needs a long plateau until two layers fit together: one that copies the previous tokens to a
token, and one that searches for them. An auxiliary loss, absent in later phases, gives both layers their targets:

* in the first layer, four heads attend to the 1st to 4th token before;
* in the second layer, for tokens of an answer that repeat earlier ones, one head attends to a value's position in its
  fact, another to the position of any other copied token;
* in the MTP module, the same for the token after the next one.
"""

from __future__ import annotations

import numpy as np
import torch

from demo_model.data import Batch
from demo_model.model import Guides

OFFSETS = (1, 2, 3, 4)


def guides_of(batch: Batch, mtp_layer: int | None) -> Guides:
    """Targets ``[B, L]`` by layer and head; ``mtp_layer`` is the module's number, or None if it does not learn."""
    rows, length = batch.tokens.shape
    positions = np.broadcast_to(np.arange(length), (rows, length))
    before = {i: np.where(positions >= offset, positions - offset, -1) for i, offset in enumerate(OFFSETS)}
    guides = {0: before, 1: _said_before(batch, 1)}
    if mtp_layer is not None:
        # Row i of the module holds token i + 1 and predicts token i + 2.
        guides[mtp_layer] = {h: np.where(t >= 0, t - 1, -1)[:, :-1] for h, t in _said_before(batch, 2).items()}
    return {layer: {h: torch.from_numpy(t.copy()) for h, t in heads.items()} for layer, heads in guides.items()}


def _said_before(batch: Batch, ahead: int) -> dict[int, np.ndarray]:
    """Earlier position of the token ``ahead`` of each token: values for head 0, any other copied token for head 1."""
    targets = {}
    for head, wanted in enumerate((batch.asked, ~batch.asked)):
        sources = np.full_like(batch.sources, -1)
        sources[:, :-ahead] = np.where(wanted, batch.sources, -1)[:, ahead:]
        targets[head] = sources
    return targets
