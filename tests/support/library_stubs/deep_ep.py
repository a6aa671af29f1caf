"""DeepEP 1.2.1: its ``Buffer``, whose exchanges go over the group that it is given, or nowhere on a fake device.

What an exchange brings is there only after its event or hook. Beside wrong arguments it refuses what would hang or
destroy data there: a low-latency exchange while another one is on its way, and one after the normal mode has used the
buffer between nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fake_cuda.events import Launch
from library_stubs.checks import BF16, E4M3, F32, I32, Refused, has_no_values, need, stub, tensor

I64 = torch.int64
HIDDEN = [2048, 2560, 4096, 5120, 6144, 7168, 8192]
RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)


class Config(NamedTuple):
    num_sms: int
    nvlink_tokens: int  # in the receiver's buffer, of each channel and rank
    rdma_tokens: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return self._bytes(min(num_ranks, 8), self.nvlink_tokens, hidden_bytes)

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 2 * self._bytes(num_ranks // 8, self.rdma_tokens, hidden_bytes) if num_ranks > 8 else 0

    def _bytes(self, peers: int, tokens: int, hidden_bytes: int) -> int:
        of_token = hidden_bytes + 128 * 12 + 128 * 4 + 24  # up to 128 experts and 128 scales
        return -(-self.num_sms // 2 * peers * tokens * of_token // -128) * -128


class EventOverlap:
    """Tensors in use stay alive until the event is waited for, as in PyTorch after ``record_stream``."""

    def __init__(self, arrive: Callable[[], object] | None = None):
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        need(self._arrive is not None, "without async_finish there is no event")
        assert self._arrive is not None
        self._arrive()


def _whole(name: str, x: Any, dtype: torch.dtype, *shape: int | None) -> None:
    """Whole numbers, weights and flags, which are read one by one."""
    need(isinstance(x, torch.Tensor) and x.dtype == dtype, f"{name} is {getattr(x, 'dtype', x)}")
    need(x.dim() == len(shape) and x.is_contiguous(), f"{name} is {list(x.shape)}, {x.stride()}")
    need(all(n in (None, m) for n, m in zip(shape, x.shape, strict=True)), f"{name} is {list(x.shape)}, not {shape}")


def _all_ranks(group: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's rows."""
    counts = [torch.zeros(1, dtype=I64) for _ in range(group.size())]
    group.allgather([counts], [torch.tensor([len(x)])]).wait()
    padded = x.new_zeros(max(1, *map(int, counts)), *x.shape[1:])
    padded[: len(x)] = x
    as_bytes = padded.view(torch.uint8)
    every = [torch.empty_like(as_bytes) for _ in counts]
    group.allgather([every], [as_bytes]).wait()
    return [one.view(x.dtype)[: int(count)] for one, count in zip(every, counts, strict=True)]


class Buffer:
    num_sms = 20

    @stub
    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False,
        num_qps_per_rank: int = 24, allow_nvlink_for_low_latency_mode: bool = True, allow_mnnvl: bool = False,
        explicitly_destroy: bool = False, comm: Any = None,
    ):  # fmt: skip
        need(group is not None and comm is None, "a group is needed")
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        need(self.ranks < 8 or self.ranks % 8 == 0, f"{self.ranks} ranks")
        need(num_nvl_bytes % 128 == num_rdma_bytes % 128 == 0, "whole 128 bytes")
        need(num_nvl_bytes < 1 << 31, "too many bytes over NVLink")
        need(low_latency_mode or num_rdma_bytes < 1 << 31, "too many bytes over RDMA")
        need(num_rdma_bytes == 0 or self.ranks > 8 or low_latency_mode, "RDMA on one node")
        self.nvlink, self.rdma, self.queues = num_nvl_bytes, num_rdma_bytes, num_qps_per_rank
        self.low_latency, self.in_flight, self.unclean = low_latency_mode, False, False
        self.lasting: Any = None  # the stream of the normal mode, on a fake device

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        need(new_num_sms % 2 == 0, "an even number")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        need(num_ranks in RANKS, f"no settings for {num_ranks} ranks")
        return Config(Buffer.num_sms, 256, 128)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        need(num_ranks in RANKS, f"no settings for {num_ranks} ranks")
        return Config(Buffer.num_sms, 288, 144)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        rows, row = num_max_dispatch_tokens_per_rank * num_experts, 2 * hidden + 4 * (hidden // 128)
        nbytes = 4 * rows * max(row, 2 * hidden + 16) + 2 * (-(-4 * num_experts // 128) * 128)
        return (nbytes + 128) // 128 * 128

    # The normal mode.

    @stub
    def get_dispatch_layout(
        self, topk_idx: Any, num_experts: int, previous_event: Any = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        _whole("topk_idx", topk_idx, I64, None, None)
        need(num_experts % self.ranks == 0, f"{num_experts} experts")
        of_rank = num_experts // self.ranks
        if has_no_values(topk_idx):
            self._run(topk_idx)
            sizes = [self.ranks, self.ranks // 8, num_experts]
            to_rank, to_node, to_expert = (topk_idx.new_empty(n, dtype=I32) for n in sizes)
            is_in_rank = topk_idx.new_empty(len(topk_idx), self.ranks, dtype=torch.bool)
        else:
            rank_of = topk_idx.div(of_rank, rounding_mode="floor")
            is_in_rank = (rank_of[:, :, None] == torch.arange(self.ranks)).any(1)
            to_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
            to_rank, to_node = is_in_rank.sum(0).int(), is_in_rank.unflatten(1, (-1, min(8, self.ranks))).any(2).sum(0)
        return to_rank, to_node.int() if self.ranks > 8 else None, to_expert, is_in_rank, EventOverlap()

    @stub
    def dispatch(
        self, x: Any, handle: Any = None, num_tokens_per_rank: Any = None, num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None, num_tokens_per_expert: Any = None, topk_idx: Any = None,
        topk_weights: Any = None, expert_alignment: int = 1, num_worst_tokens: int = 0, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        need(handle is None and num_worst_tokens == 0 and expert_alignment == 1, "not used here")
        need(previous_event is None and not allocate_on_comm_stream, "not used here")
        codes, scales = x if isinstance(x, tuple) else (x, None)
        tensor("x", codes, BF16 if scales is None else E4M3, None, None, contiguous=True)
        count, hidden = codes.shape
        need(hidden * codes.itemsize % 16 == 0, f"rows of {hidden * codes.itemsize} bytes")
        if scales is not None:
            need(hidden % 128 == 0, f"{hidden} numbers have no whole blocks of scales")
            tensor("scales", scales, F32, count, hidden // 128)
        _whole("topk_idx", topk_idx, I64, count, None)
        _whole("topk_weights", topk_weights, F32, *topk_idx.shape)
        _whole("num_tokens_per_rank", num_tokens_per_rank, I32, self.ranks)
        _whole("num_tokens_per_expert", num_tokens_per_expert, I32, None)
        _whole("is_token_in_rank", is_token_in_rank, torch.bool, count, self.ranks)
        need((num_tokens_per_rdma_rank is None) == (self.ranks <= 8), "counts by node, where there are several")
        settings = self.get_dispatch_config(self.ranks), self.get_combine_config(self.ranks)
        need(all(one.get_nvl_buffer_size_hint(2 * hidden, self.ranks) <= self.nvlink for one in settings), "NVLink")
        need(all(one.get_rdma_buffer_size_hint(2 * hidden, self.ranks) <= self.rdma for one in settings), "RDMA")
        self.unclean = self.ranks > 8
        sent, of_rank = [codes] if scales is None else [codes, scales], len(num_tokens_per_expert) // self.ranks
        if has_no_values(codes):
            pairs = topk_idx.numel()
            (total,) = num_tokens_per_rank[:1].tolist()  # the host waits for it
            empty = [one.new_empty(pairs, *one.shape[1:]) for one in (*sent, topk_idx, topk_weights)]
            *rows, ids, weights = empty
            counts = [pairs // of_rank] * of_rank
            handle = count, [total]
            event = self._side_stream([*sent, topk_idx, topk_weights, is_token_in_rank, *empty])
        else:
            everyone = [_all_ranks(self.group, one) for one in (*sent, topk_idx, topk_weights, is_token_in_rank.int())]
            chosen = [flags[:, self.rank] > 0 for flags in everyone[-1]]
            mine = [torch.cat([one[c] for one, c in zip(each, chosen, strict=True)]) for each in everyone[:-1]]
            begin = self.rank * of_rank
            outside = (mine[-2] < begin) | (mine[-2] >= begin + of_rank)
            mine[-2] = torch.where(outside, -1, mine[-2] - begin)
            mine[-1] = mine[-1].masked_fill(outside, 0.0)
            counts = torch.bincount(mine[-2][~outside], minlength=of_rank).tolist()
            *rows, ids, weights = into = [torch.full_like(one.float(), -7).to(one.dtype) for one in mine]
            event = EventOverlap(lambda: [a.copy_(b) for a, b in zip(into, mine, strict=True)])
            handle = (
                count,
                [torch.stack((torch.full_like(i, r), i)).T for r, c in enumerate(chosen) for i in c.nonzero().T],
            )
        need(async_finish, "the results are waited for by an event here")
        return rows[0] if scales is None else tuple(rows), ids, weights, counts, handle, event

    @stub
    def combine(
        self, x: Any, handle: Any, topk_weights: Any = None, bias: Any = None, config: Any = None,
        previous_event: Any = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> Any:  # fmt: skip
        tensor("x", x, BF16, None, None, contiguous=True)
        need(topk_weights is None and bias is None and async_finish, "not used here")
        count, origin = handle
        if has_no_values(x):
            total = x.new_empty(count, x.shape[1])
            return total, None, self._side_stream([x, total])
        come = torch.cat(origin)
        need(len(come) == len(x), f"{len(x)} sums of {len(come)} tokens")
        sums = torch.zeros(count, x.shape[1])
        for rows, to in zip(_all_ranks(self.group, x), _all_ranks(self.group, come), strict=True):
            mine = to[:, 0] == self.rank
            sums.index_add_(0, to[mine, 1], rows[mine].float())
        total = torch.full_like(sums, -7).to(BF16)
        return total, None, EventOverlap(lambda: total.copy_(sums))

    # The low-latency mode.

    @stub
    def low_latency_dispatch(
        self, x: Any, topk_idx: Any, num_max_dispatch_tokens_per_rank: int, num_experts: int,
        cumulative_local_expert_recv_stats: Any = None, dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True, round_scale: bool = False, use_ue8m0: bool = False, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:  # fmt: skip
        tensor("x", x, BF16, None, None, contiguous=True)
        self._check(x.shape[1], topk_idx, len(x), num_max_dispatch_tokens_per_rank, num_experts)
        need(not use_fp8 and return_recv_hook and not async_finish, "not used here")
        of_rank, size = num_experts // self.ranks, self.ranks * num_max_dispatch_tokens_per_rank
        rows, counts = x.new_empty(of_rank, size, x.shape[1]), topk_idx.new_empty(of_rank, dtype=I32)
        if has_no_values(x):
            self._run(x, topk_idx)
            handle: Any = (size, x.shape[1], num_experts, None)
            return rows, counts, handle, EventOverlap(), self._hook(lambda: self._run(rows, counts))
        rows.fill_(float("nan"))
        tokens, ids = _all_ranks(self.group, x), _all_ranks(self.group, topk_idx)
        origin = []
        for expert in range(self.rank * of_rank, (self.rank + 1) * of_rank):
            pairs = [(r, t) for r in reversed(range(self.ranks)) for t in (ids[r] == expert).nonzero()[:, 0].tolist()]
            origin.append(pairs)

        def arrive() -> None:
            for e, pairs in enumerate(origin):
                counts[e] = len(pairs)
                for at, (r, t) in enumerate(pairs):
                    rows[e, at] = tokens[r][t]

        handle = size, x.shape[1], num_experts, origin
        return rows, counts.fill_(size), handle, EventOverlap(), self._hook(arrive)

    @stub
    def low_latency_combine(
        self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any, use_logfmt: bool = False,
        zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False, out: Any = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> Any:  # fmt: skip
        size, hidden, num_experts, origin = handle
        tensor("x", x, BF16, num_experts // self.ranks, size, hidden, contiguous=True)
        self._check(hidden, topk_idx, len(topk_idx), size // self.ranks, num_experts)
        _whole("topk_weights", topk_weights, F32, *topk_idx.shape)
        need(return_recv_hook and not (async_finish or use_logfmt or zero_copy) and out is None, "not used here")
        total = x.new_empty(len(topk_idx), hidden)
        if has_no_values(x):
            self._run(x)
            return total, EventOverlap(), self._hook(lambda: self._run(topk_idx, topk_weights, total))
        come = [(r, t, self.rank * len(origin) + e) for e, pairs in enumerate(origin) for r, t in pairs]
        sent = torch.cat([x[e, : len(pairs)] for e, pairs in enumerate(origin)])
        sums = torch.zeros(len(topk_idx), hidden)
        where = _all_ranks(self.group, torch.tensor(come, dtype=I64).view(-1, 3))
        for rows, to in zip(_all_ranks(self.group, sent), where, strict=True):
            for row, (r, t, expert) in zip(rows.float(), to.tolist(), strict=True):
                if r == self.rank:
                    sums[t] += row * topk_weights[t, topk_idx[t] == expert].sum()
        total.fill_(float("nan"))
        return total, EventOverlap(), self._hook(lambda: total.copy_(sums))

    def _check(self, hidden: int, topk_idx: Any, count: int, capacity: int, experts: int) -> None:
        _whole("topk_idx", topk_idx, I64, count, None)
        need(self.low_latency, "the buffer is not for low latency")
        need(hidden in HIDDEN, f"no kernel for {hidden}")
        need(topk_idx.shape[1] <= 11, f"{topk_idx.shape[1]} experts of a token")
        need(count <= capacity, f"{count} tokens are more than {capacity}")
        need(experts % self.ranks == 0 and self.queues >= experts // self.ranks, "experts of a rank")
        need(self.ranks * capacity % 4 == 0, "rows of an expert")
        need(self.get_low_latency_rdma_size_hint(capacity, hidden, self.ranks, experts) <= self.rdma, "RDMA")
        need(not self.in_flight, "another exchange is on its way, whose counts this one clears")
        need(not self.unclean, "the normal mode has used the buffer")
        self.in_flight = True

    def _hook(self, arrive: Callable[[], object]) -> Callable[[], None]:
        def hook() -> None:
            need(self.in_flight, "it has arrived")
            self.in_flight = False
            arrive()

        return hook

    # On a fake device.

    def _run(self, *tensors: torch.Tensor) -> None:
        torch.cuda.current_stream()._device.launch(Launch("library", "deep_ep"), tensors)  # type: ignore[attr-defined]

    def _side_stream(self, tensors: list[torch.Tensor]) -> EventOverlap:
        """Launches a kernel on the library's stream."""
        self.lasting = self.lasting or torch.cuda.Stream()
        self.lasting.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.lasting):
            self._run(*tensors)
            done = torch.cuda.Event()
            done.record(self.lasting)

        def arrive() -> None:
            torch.cuda.current_stream().wait_event(done)
            tensors.clear()

        return EventOverlap(arrive)


__all__ = ["Buffer", "EventOverlap", "Refused"]
