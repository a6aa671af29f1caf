"""The input of one rank's forward pass: built once per step, read by every layer."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsa_engine.kernels.rows.segment import CuSeqlens, Segment, Segments
from dsa_engine.kernels.rows.slots_of import slots_of
from dsa_engine.kernels.runtime.transfer import upload


@dataclass(frozen=True)
class MHASegments:
    """The rows that attend in MHA form, as one varlen call takes them: each segment is a separate sequence."""

    cu_seqlens_q: CuSeqlens  # the rows of each segment
    cu_seqlens_k: CuSeqlens  # the tokens that the last row of each segment sees
    key_slots: torch.Tensor  # [cu_seqlens_k.rows] int32: cache slots of these tokens
    _parts: dict[int, list[tuple[slice, MHASegments]]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(
        cls, segments: Sequence[Segment], block_tables: torch.Tensor, page_size: int, device: torch.device
    ) -> MHASegments | None:
        """None without segments. Tokens that two segments of a request see are listed for both."""
        if not segments:
            return None
        seen = [s.end for s in segments]
        positions = torch.cat([torch.arange(count) for count in seen])
        sequences = torch.tensor([s.sequence for s in segments]).repeat_interleave(torch.tensor(seen))
        slots = slots_of(positions, block_tables, sequences, page_size)
        lengths = CuSeqlens.of([s.length for s in segments], device)
        return cls(lengths, CuSeqlens.of(seen, device), upload(slots, device))

    def parts(self, max_keys: int) -> list[tuple[slice, MHASegments]]:
        """The segments in groups that see at most ``max_keys`` tokens together, or one segment if that alone sees more:
        the rows of each group, and its segments. Made once, for all layers."""
        if max_keys not in self._parts:
            keys = self.cu_seqlens_k.offsets
            first, parts = 0, []
            while first < len(self.cu_seqlens_k):
                last = max(first + 1, bisect_right(keys, keys[first] + max_keys) - 1)
                parts.append(self._part(first, last))
                first = last
            self._parts[max_keys] = parts
        return self._parts[max_keys]

    def _part(self, first: int, last: int) -> tuple[slice, MHASegments]:
        rows, keys = self.cu_seqlens_q.offsets, self.cu_seqlens_k.offsets
        slots = self.key_slots[keys[first] : keys[last]]
        part = MHASegments(self.cu_seqlens_q.part(first, last), self.cu_seqlens_k.part(first, last), slots)
        return slice(rows[first], rows[last]), part


@dataclass
class MicroBatchPair:
    """The two micro-batches of a step that is cut, each for all layers."""

    batches: tuple[ForwardBatch, ForwardBatch]
    order: torch.Tensor | None  # [T] int64: the index of each row of the step among those of both; None: the same order


@dataclass
class ForwardBatch:
    """One rank's tensors for one forward pass over T rows; with T = 0 the rank only takes part in collectives.

    Attention has three forms, which give the same result for a row that sees at most ``index_topk`` tokens. The rows
    are sorted by form, so that each form has a slice of them:

    * ``mha``: keys and values of every head are expanded from the latent rows. Cheapest if many rows share them.
    * ``dense_mqa``: absorbed form: W_UK goes into the query, and all heads read the latent rows of all visible tokens.
    * ``sparse_mqa``: absorbed form over the ``index_topk`` rows that the lightning indexer selects.
    """

    rows: int  # T
    input_ids: torch.Tensor  # [tp_size, tp_rows] int64: ids of every rank of the tensor-parallel group, padded with 0
    cos: torch.Tensor  # [T, rope / 2] float32
    sin: torch.Tensor
    mha: MHASegments | None  # None without such rows
    dense_mqa: Segments  # rows are counted from the first row of this form
    sparse_mqa: Segments
    block_tables: torch.Tensor  # [sequences, max_pages] int32
    slot_mapping: torch.Tensor  # [R] int32: the slot of each (gathered) cache row; R is T, or cp_size · cp_rows
    gathers: bool  # whether cache rows are gathered over the context-parallel group
    cp_rows: int  # largest row count in the context-parallel group
    tp_rows: int  # … in the tensor-parallel group
    ep_rows: int  # … in the expert-parallel group
    decodes: bool  # whether this is a decode step of all ranks
    token_mask: torch.Tensor | None  # [T] bool: rows that are tokens, in a padded step; None where all are
    micro_batches: MicroBatchPair | None = None  # the layers run these instead
    first_micro_batch: bool = False  # whether the other one stores its rows of each layer after this one

    @property
    def mha_rows(self) -> int:
        """Rows [0, mha_rows) attend in MHA form."""
        return 0 if self.mha is None else self.mha.cu_seqlens_q.rows

    @property
    def first_sparse(self) -> int:
        """Rows [mha_rows, first_sparse) attend in dense MQA form, rows [first_sparse, T) in sparse MQA form."""
        return self.mha_rows + self.dense_mqa.rows
