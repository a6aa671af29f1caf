"""Expert parallelism: every rank of the group holds a part of the routed experts (`placement.py`).

A dispatch (`dispatch.py`) brings tokens to the ranks that hold their experts, each with its `topk_ids` and
`topk_weights` in one row (`kernels/moe/pack_tokens.py`), and the sums back. A dispatch sends a token to a rank at most
once, even if it has chosen several of that rank's experts.

* "all_to_all": only what is needed travels, in rounds if much comes to one rank (`all_to_all.py`). The counts depend on
  the routing, and the host waits for them. Sums add in float32, in the order of a token's pairs: the same bits each
  time.
* "all_gather": every rank gets every token (`all_gather.py`). The bytes that travel depend on the batch only. Sums add
  in the tokens' dtype, on their way back.
* "by_node": as "all_to_all", in two levels: a token crosses to a node once (`by_node.py`).
* "deep_ep", and "low_latency" in decode: by DeepEP (`deep_ep.py`).
* "auto": the one of the first three with the shortest modelled exchange for a step of this size (`traffic.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from functools import partial

import torch
import torch.nn.functional as F

from dsa_engine.kernels.moe.choose_replicas import Replicas
from dsa_engine.kernels.moe.pack_tokens import pack_tokens
from dsa_engine.kernels.runtime.transfer import download
from dsa_engine.parallel.experts import DispatchMethod, StepDispatch
from dsa_engine.parallel.experts.all_gather import AllGatherDispatch, Part, parts_of, tokens_counted_together
from dsa_engine.parallel.experts.all_to_all import (
    AllToAllDispatch,
    RecvPlan,
    SendPlan,
    in_rounds,
    rounds_needed,
)
from dsa_engine.parallel.experts.by_node import (
    ByNodeDispatch,
    NodeGroups,
    NodeTables,
    Way,
    counts_in_rounds,
    way_numbers,
)
from dsa_engine.parallel.experts.deep_ep import DeepEP, LowLatencyDispatch
from dsa_engine.parallel.experts.dispatch import Dispatch, NoDispatch, OverlappedDispatch, Received, unpacked
from dsa_engine.parallel.experts.placement import ExpertPlacement
from dsa_engine.parallel.experts.traffic import DispatchChoice, RouterShape, RowBytes
from dsa_engine.parallel.group import Group
from dsa_engine.parallel.side_stream import SideStream


class ExpertParallel:
    """The experts of a layer, divided over a group; one rank's view.

    Attributes:
        group: the ranks that hold the experts.
        placement: the experts of each rank.
        nodes: the groups inside and between nodes; None: "by_node" is "all_to_all".
        choice: chooses for "auto".
        deep_ep: the library's buffer, if an option names it.
        groups, top_groups: those of the model's router.
        even: spread pairs evenly over the ranks instead of routing them
            (:meth:`.layer_placements.ExpertDivision.even_routing`).
        quantized_sum_bytes: bytes of a sum that travels back as codes and scales, in an all-to-all or along a rail;
            None: sums travel in the tokens' dtype.
        side_stream: the stream of tokens that are sent beside other work.
    """

    def __init__(
        self,
        group: Group,
        placement: ExpertPlacement,
        nodes: NodeGroups | None = None,
        choice: DispatchChoice | None = None,
    ):
        self.group = group
        self.nodes = nodes
        self.placement = placement
        self.choice = choice
        self.deep_ep: DeepEP | None = None
        self.groups, self.top_groups = 1, 1
        self.even = False
        self.quantized_sum_bytes: int | None = None
        self.side_stream = SideStream(torch.device("cpu"))
        self._tables = NodeTables(nodes, placement) if nodes else None

    @property
    def held(self) -> tuple[int, ...]:
        """The logical experts of this rank, in the order of its weights."""
        return self.placement.held[self.group.index]

    def dispatch(
        self,
        tokens: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        method: StepDispatch,
        max_tokens: int,
        max_pairs: int = sys.maxsize,
        sum_bytes: int | None = None,
        unsent: list[Callable[[], None]] | None = None,
    ) -> Dispatch:
        """Brings each of ``tokens [T, width]`` to its experts ``topk_ids [T, k]``; every rank of the group takes part.

        Args:
            tokens: numbers or words, as the experts take them.
            topk_ids: logical experts, int32; −1 is no expert.
            topk_weights: ``[T, k]`` float32.
            method: see the module; "low_latency" takes tokens as numbers, and is "all_gather" if there are too many.
            max_tokens: the largest token count of a rank of the group.
            max_pairs: bound on the token-expert pairs of a rank in a round
                (:func:`.all_to_all.rounds_needed`, :func:`.all_gather.parts_of`). More pairs take several rounds, and
                if there may be more, the host waits for their number.
            sum_bytes: of a token's sum in the tokens' dtype; default: those of the token.
            unsent: gets :meth:`.OverlappedDispatch.send` of tokens whose counts the host has to know; None: they are
                sent.
        """
        if self.group.size == 1:
            return NoDispatch(Received(tokens, self.to_physical(topk_ids), topk_weights, 1.0))
        if method == "auto":
            method = self._chosen(tokens, topk_ids.shape[1], max_tokens, max_pairs, sum_bytes)
        library = self.deep_ep
        if method == "low_latency" and library is not None and max_tokens <= library.capacity:
            return LowLatencyDispatch(library, tokens, self.to_physical(topk_ids), topk_weights)
        if method in ("all_gather", "low_latency"):
            return self._all_gather(tokens, topk_ids, topk_weights, max_tokens, max_pairs)
        topk_ids = self.to_physical(topk_ids)
        if method == "deep_ep" and library is not None:
            fraction = max(1 / topk_ids.shape[1], self.placement.fraction(self.group.index))
            received, add = library.normal(tokens, topk_ids, topk_weights, fraction)
            return AllGatherDispatch(received, partial(self._parts, max_pairs), add, len(tokens))
        if method == "by_node" and self.nodes is not None:
            steps = self._by_node(tokens, topk_ids, topk_weights, max_pairs, self.nodes)
        else:
            steps = self._all_to_all(tokens, topk_ids, topk_weights, max_pairs)
        if unsent is not None:
            overlapped = OverlappedDispatch(steps, self.side_stream)
            unsent.append(overlapped.send)
            return overlapped
        *_, dispatch = steps
        assert dispatch is not None
        return dispatch

    def to_physical(self, topk_ids: torch.Tensor) -> torch.Tensor:
        """The physical experts ``[T, k]`` for this rank's logical ones."""
        if self.even:
            return self.placement.spread(topk_ids, self.group.index * topk_ids.numel())
        return self.placement.to_physical(topk_ids, self.group.index)

    @property
    def choosing(self) -> Replicas | None:
        """What :func:`.pack_tokens` does the same with as it packs; None: only :meth:`to_physical` does it."""
        return None if self.even else self.placement.choosing(self.group.index)

    def _counts(self, sent: torch.Tensor) -> Generator[None, None, tuple[RecvPlan, int]]:
        """Tells every rank what comes to it, and the number of pairs of the most loaded rank; stops before it waits. In
        a dispatch of one round, the host waits for nothing else.

        Args:
            sent: int32 ``[size, 2]``, to each rank: tokens, and its pairs in them.
        """
        size, index = self.group.size, self.group.index
        all_ranks = self.group.all_gather(sent).view(size, size, 2)  # from, to
        largest = all_ranks[..., 1].sum(dim=0, dtype=torch.int32).amax()
        read = download(torch.cat((sent, all_ranks[:, index], largest.expand(1, 2))))
        yield
        rows = read()
        return RecvPlan.of(rows[:size], rows[size:-1]), rows[-1][0]

    def _plans(self, group: Group, sent: torch.Tensor) -> list[RecvPlan]:
        """The plan of every round, whose rows and pairs ``sent [rounds, size, 2]`` go to each rank; the host
        waits."""
        received = group.all_to_all(sent.transpose(0, 1).contiguous()).transpose(0, 1)
        both = download(torch.stack((sent, received), dim=1))()
        return [RecvPlan.of(*one) for one in both]

    def _ways(self, sent: torch.Tensor, groups: NodeGroups, takers: torch.Tensor) -> Generator[None, None, list[Way]]:
        """Tells every rank what comes to it along its rail and inside its node, in every round along the rail; stops
        before it waits.

        Args:
            sent: int32 ``[rounds, size, 4]`` (:func:`.by_node.counts_in_rounds`).
        """
        by_pair = self.group.all_gather(sent).view(self.group.size, *sent.shape).transpose(0, 1)
        read = download(way_numbers(by_pair, self.group.index, takers))
        yield
        return [Way.of(row, groups) for row in read()]

    def _gather(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_tokens: int
    ) -> Callable[[], Received]:
        """Starts to gather the tokens of all ranks, ``max_tokens`` rows of each. Padding has no experts, so no expert
        works on it.

        Args:
            topk_ids: logical experts.

        Returns:
            a function that waits for them.
        """
        group, k, replicas = self.group, topk_ids.shape[1], self.choosing
        if replicas is None:
            topk_ids = self.to_physical(topk_ids)
        packed = pack_tokens(tokens, topk_ids, topk_weights, rows=max_tokens, replicas=replicas)
        wait = group.all_gather_async(packed)

        def received() -> Received:
            fraction, first = self.placement.fraction(group.index), self.placement.first(group.index)
            return Received(*unpacked(wait(), tokens, k), fraction, first=first)

        return received

    def _local_pairs(self, received: Received, together: int) -> list[int]:
        """Number of gathered pairs with experts of this rank, of each ``together`` tokens; the host waits for it."""
        topk_ids = received.local(self.placement.count(self.group.index))
        if missing := -len(topk_ids) % together:
            topk_ids = F.pad(topk_ids, (0, 0, 0, missing), value=-1)
        return download((topk_ids.view(-1, together * topk_ids.shape[1]) >= 0).sum(dim=1))()

    def _all_to_all(
        self, tokens: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, max_pairs: int
    ) -> Iterator[Dispatch | None]:
        """Stops before the host waits for counts; then gives the dispatch."""
        group, k = self.group, topk_ids.shape[1]
        plan = SendPlan.of(topk_ids, self.placement.rank_of, group.size)
        whole, largest = yield from self._counts(plan.counts)
        rows, rounds = sum(whole.send), rounds_needed(largest, max_pairs, group.size, k)
        if rounds == 1:
            source, pair_rows, plans = plan.order.tokens[:rows], plan.order.pair_rows, [whole]
        else:
            source, pair_rows, counts = in_rounds(plan, rows, rounds)
            plans = self._plans(group, counts)
        quantized = self.quantized_sum_bytes is not None
        yield AllToAllDispatch(
            group, self.placement, tokens, topk_ids, topk_weights, source, pair_rows, plans, quantized_sums=quantized
        )

    def _by_node(
        self,
        tokens: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_pairs: int,
        groups: NodeGroups,
    ) -> Iterator[Dispatch | None]:
        """As :meth:`_all_to_all`."""
        placement, tables, (size, k) = self.placement, self._tables, (self.group.size, topk_ids.shape[1])
        assert tables is not None
        along, final = SendPlan.of(topk_ids, tables.peers, size), SendPlan.of(topk_ids, placement.rank_of, size)
        ways = yield from self._ways(torch.cat((final.counts, along.counts), dim=1)[None], groups, tables.takers)
        rows, rounds = sum(ways[0].along.send), rounds_needed(ways[0].brought, max_pairs, tables.largest_rail, k)
        source, pair_rows = along.order.tokens[:rows], along.order.pair_rows
        if rounds > 1:
            cut = in_rounds(along, rows, rounds)
            source, pair_rows, _ = cut
            ways = yield from self._ways(counts_in_rounds(final, along, cut), groups, tables.takers)
        inner_rounds = [rounds_needed(way.busiest, max_pairs, tables.largest_node, k) for way in ways]

        def pass_on(number: int, brought: Received) -> Dispatch:
            return self._inside(groups.node, tables.inner, brought, ways[number].inside, inner_rounds[number])

        plans, quantized = [way.along for way in ways], self.quantized_sum_bytes is not None

        def rail() -> Dispatch:
            return AllToAllDispatch(
                groups.rail, tables.whole, tokens, topk_ids, topk_weights, source, pair_rows, plans, 0, quantized
            )

        yield ByNodeDispatch(groups, rail, pass_on, inner_rounds)

    def _inside(self, node: Group, rank_of: torch.Tensor, brought: Received, whole: RecvPlan, rounds: int) -> Dispatch:
        """Passes tokens on inside the node.

        Args:
            rank_of: the index in the node of each physical expert's rank.
        """
        plan, rows = SendPlan.of(brought.topk_ids, rank_of, node.size), sum(whole.send)
        if rounds == 1:
            source, pair_rows, plans = plan.order.tokens[:rows], plan.order.pair_rows, [whole]
        else:
            source, pair_rows, counts = in_rounds(plan, rows, rounds)
            plans = self._plans(node, counts)
        rank, (tokens, topk_ids, topk_weights) = self.group.index, brought[:3]
        return AllToAllDispatch(node, self.placement, tokens, topk_ids, topk_weights, source, pair_rows, plans, rank)

    def _chosen(
        self, tokens: torch.Tensor, k: int, max_tokens: int, max_pairs: int, sum_bytes: int | None
    ) -> DispatchMethod:
        """What "auto" is for a step, the same on every rank."""
        assert self.choice is not None
        sent = tokens.shape[1] * tokens.dtype.itemsize
        row = RowBytes.of(sent, k, sum_bytes, self.quantized_sum_bytes)
        routing = RouterShape(self.placement.experts, k, self.groups, self.top_groups)
        return self.choice.method(max_tokens, max_pairs, row, routing)

    def _all_gather(
        self,
        tokens: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        max_tokens: int,
        max_pairs: int,
    ) -> Dispatch:
        gathered = self._gather(tokens, topk_ids, topk_weights, max_tokens)
        return AllGatherDispatch(
            gathered, partial(self._parts, max_pairs), self.group.reduce_scatter_async, len(tokens)
        )

    def _parts(self, max_pairs: int, received: Received) -> list[Part]:
        """The rounds of tokens that have come at once; the host waits for counts, unless they all fit or are known."""
        (rows, k), pairs = received.topk_ids.shape, received.local_pairs
        max_per_token = min(k, self.placement.count(self.group.index))
        if (rows * max_per_token if pairs is None else pairs) <= max_pairs:
            return [Part(0, rows, pairs)]
        together = tokens_counted_together(max_pairs, max_per_token)
        return parts_of(self._local_pairs(received, together), together, rows, max_pairs)
