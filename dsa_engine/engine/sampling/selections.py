"""What the tokens of requests with ``SamplingParams.selection`` are sampled from: which tokens every layer looked at.

The rank that computes a row records it, and sends it to the first rank, whose callers want it. A step that records is
run kernel by kernel and read at once, by the same kernels: its tokens are what they would be.
"""

from __future__ import annotations

import numpy as np
import torch

from dsa_engine.engine.requests.limits import pages_for
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.steps.plan import StepPlan, Wanted
from dsa_engine.kernels.runtime.transfer import upload
from dsa_engine.model.forward_batch import ForwardBatch
from dsa_engine.model.selection import SelectionRecorder
from dsa_engine.outputs import Selection
from dsa_engine.parallel import Mesh

Selections = dict[int, dict[int, Selection]]  # by the request's id and the number of its output token


def named_pages(request: Request, tokens: int, batch: ForwardBatch, page_size: int) -> np.ndarray:
    """int32, the pages of a request's first tokens, as recorded selections name them."""
    pages = np.array(request.pages[: pages_for(tokens, page_size)], np.int32)
    if batch.buffers is not None:
        return batch.buffers.pages_of(pages)
    return pages if batch.shards is None else np.arange(len(pages), dtype=np.int32)  # positions are recorded


def recorder_of(plan: StepPlan, batch: ForwardBatch, page_size: int, index_topk: int) -> SelectionRecorder:
    wanted = _wanted(plan)
    visible, pages = np.full((len(wanted), index_topk), -1, np.int32), []
    for row, (request, position, _) in zip(visible, wanted, strict=True):
        of_request = named_pages(request, position, batch, page_size)
        pages.append(of_request)
        first = np.arange(min(position, index_topk))
        row[: len(first)] = of_request[first // page_size] * page_size + first % page_size
    on_device = upload(torch.from_numpy(visible), batch.slot_mapping.device)
    return SelectionRecorder([one.row for one in wanted], pages, on_device)


def recorded(recorder: SelectionRecorder, plan: StepPlan, layers: int, page_size: int, mesh: Mesh) -> Selections:
    """What a step has recorded in each of so many layers, on rank 0; nothing on others. It waits for the device."""
    wanted, world, selections = _wanted(plan), mesh.world, Selections()
    ids = torch.tensor([(one.request.id, one.position - len(one.request.prompt)) for one in wanted]).view(-1, 2)
    table = torch.empty(0)
    if wanted:
        table = torch.stack(recorder.layers, dim=1).cpu()  # [n, layers, 2, index_topk]
        for pages, of_row in zip(recorder.pages, table.numpy(), strict=True):
            _put_in_order(of_row[:, 0], of_row[:, 1], pages, page_size)
    counts = [len(wanted)] if world.alone else mesh.all_gather_int(len(wanted))
    if mesh.rank:
        for tensor in (ids, table) if wanted else ():
            world.send(tensor.to(mesh.device), 0)
        return selections
    for rank in np.flatnonzero(counts).tolist():
        if rank:
            count = counts[rank]
            ids = world.recv(torch.empty(count, 2, dtype=torch.int64, device=mesh.device), rank).cpu()
            size = (count, layers, 2, recorder.visible.shape[1])
            table = world.recv(torch.empty(size, dtype=torch.int32, device=mesh.device), rank).cpu()
        for (request, number), of_row in zip(ids.tolist(), table.numpy(), strict=True):
            both = of_row[:, None, 0].copy(), of_row[:, None, 1].view(np.float32).copy()  # so that the table can go
            selections.setdefault(request, {})[number] = Selection(*both)
    return selections


def _wanted(plan: StepPlan) -> list[Wanted]:
    """The rows of this rank that are recorded."""
    return [one for one in plan.own.wanted if one.position - len(one.request.prompt) < one.request.params.selection]


def _put_in_order(slots: np.ndarray, weights: np.ndarray, pages: np.ndarray, page_size: int) -> None:
    """Replaces the slots of each layer, ``[layers, index_topk]``, by the positions of a request that has these pages,
    and sorts them with their weights, all in place; −1 comes last."""
    by_page = pages.argsort()
    at = pages[by_page].searchsorted(slots // page_size).clip(max=len(pages) - 1)
    positions = np.where(slots < 0, np.iinfo(np.int32).max, by_page[at] * page_size + slots % page_size)
    order = positions.argsort(axis=1)
    slots[:] = np.where(slots < 0, slots, positions)
    slots[:], weights[:] = (np.take_along_axis(one, order, axis=1) for one in (slots, weights))
