"""DeepEP as a dispatch, where ``moe_dispatch`` or ``decode_dispatch`` is "deep_ep". It has not yet run on a GPU.

Signatures of release 1.2.1 (September 2025); its ``Buffer`` is still that of 2.1.0. Ids are int64, sums bfloat16.

    normal        prefill: a token goes once to each rank with experts of it, in bfloat16 or as e4m3 codes with scales;
                  the host waits for the counts. Our experts weigh, and the library adds the ranks' sums.
    low latency   decode: a token goes to each of its experts, in bfloat16, into rows [experts of the rank, ranks ·
                  capacity, hidden]. Counts stay on the device, so CUDA graphs are possible. The library weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from dsa_engine.kernels.formats.quantize import codes_and_scales
from dsa_engine.kernels.runtime import libraries
from dsa_engine.kernels.runtime.integers import cdiv
from dsa_engine.parallel.experts.all_gather import AllGather, AllGatherDispatch
from dsa_engine.parallel.experts.dispatch import (
    Dispatch,
    Dispatcher,
    Memory,
    ModelSizes,
    PrefillSizes,
    Ranks,
    Received,
    Routed,
    Sends,
    StepSizes,
)
from dsa_engine.parallel.experts.placement import ExpertParallel

_DEVICE = "cuda"
_HIDDEN = (2048, 2560, 4096, 5120, 6144, 7168, 8192)  # sizes of the low-latency kernels
_RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)  # those with recommended settings
_NODE, _TOP_K = 8, 11  # largest numbers: ranks of a node, experts of a token
_CAPACITY = 256  # tokens of a rank; its memory grows with experts · capacity, to 3.8 GB for those of V3.2


class DeepEP(Dispatcher):
    """The normal mode, and the library's buffer on one rank, for all layers and both modes. ``capacity``: tokens of a
    rank in an exchange of the low-latency mode; ``experts``: number of physical experts."""

    def __init__(self, mesh: Ranks):
        self._prefills = mesh.config.moe_dispatch == "deep_ep"
        self._decodes = mesh.config.decode_dispatch == "deep_ep"
        self._group, self._device, self._nodes = mesh.ep, mesh.device, [*mesh.nodes]
        self._arrive: Callable[[], None] = lambda: None  # lets the low-latency exchange on its way arrive

    def prepare(self, sizes: ModelSizes) -> None:
        hidden, experts, top_k, rows, dtype = sizes
        ranks, nodes, device = len(self._nodes), self._nodes, self._device
        both, blocks = self._prefills and self._decodes, [rank // _NODE for rank in range(ranks)]
        for fits, given, possible in (
            (device.type == _DEVICE, f"the device is {device.type}", "it needs NVIDIA GPUs"),
            (libraries.is_installed("deep_ep"), "no package deep_ep is installed", "install DeepEP 1.2.1 or newer"),
            (dtype == torch.bfloat16, f"dtype is {str(dtype).removeprefix('torch.')}", "give bfloat16"),
            (ranks in _RANKS, f"there are {ranks} ranks", f"start one of {_RANKS}"),
            (nodes == blocks, f"ranks are on nodes {nodes}", f"start up to {_NODE} on one node, or {_NODE} on each"),
            (hidden in _HIDDEN, f"hidden_size is {hidden}", f"it takes one of {_HIDDEN}"),
            (top_k <= _TOP_K, f"tokens have {top_k} experts", f"it takes up to {_TOP_K}"),
            (experts % ranks == 0, f"{experts} experts on {ranks} ranks", "make them even by redundant_experts"),
            # Between nodes both modes share a buffer, which the normal one leaves unclean for the other.
            (not both or ranks <= _NODE, f"both options on {ranks} ranks", "give one, or prefill_ranks"),
        ):
            if not fits:
                option = "moe_dispatch" if self._prefills else "decode_dispatch"
                raise ValueError(f"{option} 'deep_ep': {given}; {possible}, or use 'all_to_all' or 'all_gather'")
        self.capacity = min(cdiv(rows, 4) * 4, _CAPACITY)
        self.experts, self._hidden = experts, hidden

    def for_decode(self) -> Dispatcher:
        return LowLatency(self)

    def takes_words(self, blockwise: bool) -> bool:
        return blockwise

    def memory(self, sizes: PrefillSizes) -> Memory:
        """All comes at once that routing brings to a rank: tokens, and their sums."""
        return AllGather().memory(sizes)._replace(held=2 * sizes.tokens * sizes.ranks * sizes.back)

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        topk_ids = experts.to_physical(routed.topk_ids)
        fraction = max(1 / topk_ids.shape[1], experts.fraction)
        received, add = self.normal(routed._replace(topk_ids=topk_ids), fraction)
        return AllGatherDispatch(experts, received, add, len(topk_ids), step.max_pairs)

    @cached_property
    def buffer(self) -> Any:
        """Made at the first dispatch, by all ranks. An exit must not wait for ranks that have failed, so nothing is
        destroyed before the process is."""
        library, size = import_module("deep_ep").Buffer, self._group.size
        memory, nbytes = [(0, 0)], 2 * self._hidden  # over NVLink, over RDMA
        for one in (library.get_dispatch_config(size), library.get_combine_config(size)) if self._prefills else ():
            memory.append((one.get_nvl_buffer_size_hint(nbytes, size), one.get_rdma_buffer_size_hint(nbytes, size)))
        queues = {}
        if self._decodes:
            sizes = self.capacity, self._hidden, size, self.experts
            memory.append((0, library.get_low_latency_rdma_size_hint(*sizes)))
            queues = {"low_latency_mode": True, "num_qps_per_rank": self.experts // size}
        return library(self._group.handle, *map(max, zip(*memory, strict=True)), explicitly_destroy=True, **queues)

    def normal(
        self, routed: Routed, fraction: float
    ) -> tuple[Callable[[], Received], Callable[[torch.Tensor], Callable[[], torch.Tensor]]]:
        """Sends tokens, numbers or words of codes and scales, to physical experts; returns the functions ``gathered``
        and ``add`` of :class:`.AllGatherDispatch`."""
        tokens, topk_ids, topk_weights = routed
        buffer, ids, words = self.buffer, topk_ids.long(), tokens.dtype == torch.int32
        sent = tuple(part.contiguous() for part in codes_and_scales(tokens, self._hidden)) if words else tokens
        to_rank, to_node, to_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, self.experts)
        rows, local_ids, weights, counts, handle, event = buffer.dispatch(
            sent, num_tokens_per_rank=to_rank, num_tokens_per_rdma_rank=to_node, is_token_in_rank=is_in_rank,
            num_tokens_per_expert=to_expert, topk_idx=ids, topk_weights=topk_weights, async_finish=True,
        )  # fmt: skip

        def received() -> Received:
            event.current_stream_wait()
            come = torch.cat([part.view(torch.int32) for part in rows], dim=1) if words else rows
            return Received(come, local_ids.int(), weights, fraction, sum(counts))

        def add(sums: torch.Tensor) -> Callable[[], torch.Tensor]:
            total, _, done = buffer.combine(sums.contiguous(), handle, async_finish=True)
            return lambda: done.current_stream_wait() or total

        return received, add

    @cached_property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """The number of a received row among its expert's ``[rows]``, that of each expert ``[experts of the rank, 1]``,
        −1, all int32, and a weight of 1 for every row of all experts ``[all, 1]``."""
        sizes = self._group.size * self.capacity, self.experts // self._group.size
        at, expert = (torch.arange(size, dtype=torch.int32, device=self._device) for size in sizes)
        ones = torch.ones(len(at) * len(expert), 1, device=self._device)
        return at, expert[:, None], torch.full_like(at[0], -1), ones

    def exchange(self, call: Callable[..., Any], *args: Any, **options: Any) -> tuple[list[Any], Callable[[], None]]:
        """Begins a low-latency exchange, once the one before has arrived, as it clears the counts of that; returns the
        results, and a function that lets them arrive."""
        self._arrive()
        *results, _, hook = call(*args, return_recv_hook=True, **options)

        def arrive() -> None:
            if self._arrive is arrive:
                self._arrive = lambda: None
                hook()

        self._arrive = arrive
        return results, arrive


class LowLatency(Dispatcher):
    """The low-latency mode; steps with more tokens than it has room for are gathered."""

    static_shapes = True

    def __init__(self, library: DeepEP):
        self._library, self._gathers = library, AllGather()

    def prepare(self, sizes: ModelSizes) -> None:
        self._library.prepare(sizes)

    def takes_words(self, blockwise: bool) -> bool:
        return False

    def memory(self, sizes: PrefillSizes) -> Memory:
        return self._library.memory(sizes)

    def start(self, experts: ExpertParallel, routed: Routed, step: StepSizes, unsent: Sends | None = None) -> Dispatch:
        if step.max_tokens > self._library.capacity:
            return self._gathers.start(experts, routed, step)
        return LowLatencyDispatch(self._library, routed._replace(topk_ids=experts.to_physical(routed.topk_ids)))


make = DeepEP


class LowLatencyDispatch(Dispatch):
    """Tokens of a decode step, at most ``capacity`` of a rank."""

    rounds = 1

    def __init__(self, library: DeepEP, routed: Routed):
        tokens, topk_ids, topk_weights = routed
        self._library, self._topk = library, (topk_ids.long(), topk_weights)
        sizes = library.capacity, library.experts
        call = library.buffer.low_latency_dispatch
        self._come, self._arrive = library.exchange(call, tokens, self._topk[0], *sizes, use_fp8=False)

    def receive(self, number: int) -> Received:
        self._arrive()
        rows, counts, self._handle = self._come
        self._shape, (at, expert, none, ones) = rows.shape, self._library.rows
        local_ids = torch.where(at < counts[:, None], expert, none).view(-1, 1)
        return Received(rows.flatten(0, 1), local_ids, ones, min(1.0, self._topk[0].numel() / len(ones)))

    def send_back(self, number: int, sums: torch.Tensor) -> None:
        call = self._library.buffer.low_latency_combine
        (self._sums,), self._arrive = self._library.exchange(call, sums.view(self._shape), *self._topk, self._handle)

    def combine(self) -> torch.Tensor:
        self._arrive()
        return self._sums
