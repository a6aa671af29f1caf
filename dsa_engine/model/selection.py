"""What rows of a pass attend to, recorded layer by layer for ``SamplingParams.selection``.

The weight of token s for the query at t is its part of the attention (DeepSeek-V3.2-Exp report, equation 2), on average
over the H heads::

    w_{t,s} = 1/H · Σ_h softmax_s(scale · q_{t,h} · row_s)              s: the tokens that t attends to
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dsa_engine.kernels.attention.gather_latent import gather_latent
from dsa_engine.kernels.formats.row_format import LatentFormat
from dsa_engine.model.context_shards import GroupRows


@dataclass
class SelectionRecorder:
    """Gets each layer's selection for n rows of a batch, in any order. ``pages``: for each row the pages of its
    request, as slots name them."""

    rows: Sequence[int]
    pages: Sequence[npt.NDArray[np.int32]]
    # int32 [n, index_topk] on the device: slots of the first tokens that each row sees, −1 after them. A row that is
    # not in sparse form attends to these.
    visible: torch.Tensor
    # int32 [n, 2, index_topk] of each layer so far: slots, and the bits of float32 weights; in any order.
    layers: list[torch.Tensor] = field(default_factory=list)

    def record(
        self,
        q_mha: torch.Tensor,
        q_mqa: torch.Tensor,
        w_uk: torch.Tensor,
        mha_rows: int,
        first_sparse: int,
        pool: torch.Tensor,
        topk_slots: torch.Tensor | None,
        in_pool: torch.Tensor | None,
        row_format: LatentFormat,
        scale: float,
    ) -> None:
        """Adds a layer, row by row, so that its memory is that of ``index_topk`` latent rows. The arguments are those
        of :class:`.Attention` and :class:`.ForwardBatch`; ``pool``: the layer's latent rows, where ``in_pool`` are the
        selected ones."""
        nope, tables = w_uk.shape[1], []
        for number, row in enumerate(self.rows):
            if row < mha_rows:
                unrotated, rotated = q_mha[row, :, :nope], q_mha[row, :, nope:]
                absorbed = torch.einsum("hn,hnr->hr", unrotated.float(), w_uk.float())
                q = torch.cat((absorbed, rotated.float()), dim=1)
            else:
                q = q_mqa[row - mha_rows].float()
            slots = held = self.visible[number]
            if row >= first_sparse:
                assert topk_slots is not None and in_pool is not None, "sparse rows need a selection"
                slots, held = topk_slots[row - first_sparse], in_pool[row - first_sparse]
            latent = gather_latent(pool, held.clamp(min=0), row_format, q_mqa.dtype).float()
            scores = (q @ latent.T).mul_(scale).masked_fill_(slots < 0, -torch.inf)
            tables.append(torch.stack((slots, scores.softmax(dim=1).mean(dim=0).view(torch.int32))))
        if tables:
            self.layers.append(torch.stack(tables))

    def record_together(
        self,
        shards: GroupRows,
        q: torch.Tensor,
        lse: torch.Tensor,
        pool: torch.Tensor,
        topk_slots: torch.Tensor,
        in_pool: torch.Tensor,
        row_format: LatentFormat,
        scale: float,
    ) -> None:
        """Adds a layer where ranks hold contexts together, with positions in place of slots: each rank has the weights
        of its tokens for all rows and sends them to the row's rank. ``q``, ``topk_slots``, ``in_pool``: of all rows;
        ``lse``: of this rank's rows, merged."""
        tables, k = [], topk_slots.shape[1]
        of_rows = zip(topk_slots, in_pool, shards.group.all_gather(lse), strict=True)
        for number, (slots, held, sums) in enumerate(of_rows):
            latent = gather_latent(pool, held.clamp(min=0), row_format, q.dtype).float()
            weights = ((q[number].float() @ latent.T).mul_(scale) - sums[:, None]).exp_().mean(dim=0)
            positions = shards.positions_of(number, slots)
            tables.append(torch.stack((positions, weights.masked_fill_(slots < 0, 0.0).view(torch.int32))))
        parts = shards.group.all_to_all(torch.stack(tables)).view(shards.group.size, -1, 2, k)
        mine = parts[:, self.rows].permute(1, 2, 0, 3).flatten(2)  # [n, 2, ranks · index_topk]
        order = mine[:, 0].lt(0).int().argsort(dim=1, stable=True)[:, :k]
        self.layers.append(mine.gather(2, order[:, None].expand(-1, 2, -1)))
