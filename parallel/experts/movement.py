"""The movement of experts' weights from one placement of a layer to another, in place.

The plan is the same on every rank and needs no device. It works in rounds. In a round a rank receives at most a given
number of experts, into a staging buffer of that size; all ranks send what their slots hold when the round begins; then
the staged weights go into their slots. So a slot is never read after it is overwritten, and two ranks can swap experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch

from dsa_engine.parallel.experts.placement import Held
from dsa_engine.parallel.group import Group


class Move(NamedTuple):
    """A slot is a rank's physical expert, counted within the rank. The two ranks may be the same."""

    source: int
    source_slot: int
    target: int
    target_slot: int


def with_fewest_moves(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], nodes: int = 1) -> Held:
    """The placement ``new`` with its ranks exchanged, so that many experts stay where ``old`` has them (greedily).
    ``nodes``: number of blocks of consecutive ranks that stay together."""
    size = len(new) // nodes

    def blocks(held: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[*chain(*held[first : first + size])] for first in range(0, len(held), size)]

    order: list[int] = []
    for block, other in enumerate(_paired(blocks(old), blocks(new))):
        first, from_first = block * size, other * size
        ranks = _paired(old[first : first + size], new[from_first : from_first + size])
        order += [from_first + rank for rank in ranks]
    return tuple(tuple(new[rank]) for rank in order)


def _paired(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[int]:
    """For each list of ``old`` the number of another list of ``new``, of the same length and with many of its
    experts."""
    sets = [[set(experts) for experts in lists] for lists in (old, new)]
    common = sorted(
        (-len(one & other), i, j)
        for i, one in enumerate(sets[0])
        for j, other in enumerate(sets[1])
        if len(old[i]) == len(new[j])
    )
    of_old: dict[int, int] = {}
    taken: set[int] = set()
    for _, i, j in common:
        if i not in of_old and j not in taken:
            of_old[i] = j
            taken.add(j)
    return [of_old[i] for i in range(len(old))]


def after_round(held: Sequence[Sequence[int]], moves: Sequence[Move]) -> Held:
    """The experts of each rank when a round of moves has happened."""
    now = [list(slots) for slots in held]
    for move in moves:
        now[move.target][move.target_slot] = held[move.source][move.source_slot]
    return tuple(map(tuple, now))


class _Want(NamedTuple):
    rank: int
    slot: int
    expert: int


def plan_movement(old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], staged: int = 1) -> list[list[Move]]:
    """Plans the movement of one layer: the moves of each round, which happen at the same time.

    Args:
        old, new: the logical experts of each rank, which keeps their number; their order in ``new`` does not matter,
            and all are in ``old``.
        staged: maximum number of experts that a rank receives in a round.
    """
    return [*_with_sources(_packed(_Order(old, new).groups(), old, staged), old)]


class _Order:
    """Orders wants so that no expert's last copy is overwritten before a rank that needs it has received it.

    A want that overwrites a last copy needs a want of that expert in the same group or before. Following this from want
    to want gives a chain, or a cycle. If a chain comes to a rank twice, the two wants exchange their slots there, which
    closes a shorter cycle: so a group needs no more than one staged expert on a rank.
    """

    def __init__(self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]]):
        self.now = [list(slots) for slots in old]
        self.copies = Counter(expert for slots in old for expert in slots)
        self.wants: dict[tuple[int, int], _Want] = {}  # by rank and slot
        for rank, (before, after) in enumerate(zip(old, new, strict=True)):
            arriving = Counter(after) - Counter(before)
            leaving = Counter(before) - Counter(after)
            slots = []
            for slot, expert in enumerate(before):
                if leaving[expert]:
                    leaving[expert] -= 1
                    slots.append(slot)
            for slot, expert in zip(slots, sorted(arriving.elements()), strict=True):
                self.wants[rank, slot] = _Want(rank, slot, expert)

    def groups(self) -> list[list[_Want]]:
        """All wants, in groups that happen at once."""
        groups = []
        while self.wants:
            group = self._group(next(iter(self.wants.values())))
            for want in group:
                del self.wants[want.rank, want.slot]
                self.copies[self.now[want.rank][want.slot]] -= 1
            for want in group:
                self.now[want.rank][want.slot] = want.expert
                self.copies[want.expert] += 1
            groups.append(group)
        return groups

    def _group(self, first: _Want) -> list[_Want]:
        chain, number = [first], {first.rank: 0}  # number: place in the chain of the want of a rank
        lost: Counter[int] = Counter()
        while True:
            last = chain[-1]
            expert = self.now[last.rank][last.slot]
            lost[expert] += 1
            if self.copies[expert] > lost[expert] or any(want.expert == expert for want in chain):
                return chain
            following = next((want for want in self.wants.values() if want.expert == expert), None)
            if following is None:
                return chain
            if following.rank in number:
                at = number[following.rank]
                before = chain[at]
                self.wants[before.rank, before.slot] = closing = following._replace(slot=before.slot)
                self.wants[following.rank, following.slot] = before._replace(slot=following.slot)
                return [*chain[at + 1 :], closing]
            number[following.rank] = len(chain)
            chain.append(following)


def _packed(groups: Sequence[Sequence[_Want]], old: Sequence[Sequence[int]], staged: int) -> Iterator[list[_Want]]:
    """Puts groups together while no rank receives more than ``staged`` experts.

    A group may overtake others if that leaves a copy of each expert also when these have overwritten theirs. So the
    first group that remains can always be next, as it could in the given order.
    """
    copies = Counter(chain(*old))
    remaining = [(group, Counter(old[want.rank][want.slot] for want in group)) for group in groups]
    while remaining:
        received: Counter[int] = Counter()
        reserved: Counter[int] = Counter()  # copies that overtaken groups will overwrite
        happens: list[_Want] = []
        later = []
        for group, losses in remaining:
            full = any(received[want.rank] >= staged for want in group)
            gains = [want.expert for want in group]
            if full or any(copies[x] + gains.count(x) - lost - reserved[x] <= 0 for x, lost in losses.items()):
                later.append((group, losses))
                for x in losses:
                    reserved[x] += losses[x]
                continue
            happens += group
            for want in group:
                received[want.rank] += 1
                copies[want.expert] += 1
            for x in losses:
                copies[x] -= losses[x]
        yield happens
        remaining = later


def _with_sources(rounds: Iterable[Sequence[_Want]], old: Sequence[Sequence[int]]) -> Iterator[list[Move]]:
    """The moves of each round: from the rank itself if it has the expert, else from the rank that has sent least."""
    held, sent = old, Counter[int]()
    for wants in rounds:
        slots: dict[int, dict[int, int]] = {}  # for each expert, a slot by rank
        for rank, experts in enumerate(held):
            for slot, expert in enumerate(experts):
                slots.setdefault(expert, {})[rank] = slot
        moves = []
        for want in wants:
            ranks = slots[want.expert]
            source = want.rank if want.rank in ranks else min(ranks, key=lambda rank: (sent[rank], rank))
            sent[source] += source != want.rank
            moves.append(Move(source, ranks[source], want.rank, want.slot))
        held = after_round(held, moves)
        yield moves


def expert_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of one expert in ``tensors``, each ``[experts, …]``."""
    return sum(tensor[:1].nbytes for tensor in tensors)


def move_round(group: Group, moves: Sequence[Move], tensors: Sequence[torch.Tensor], staging: torch.Tensor) -> None:
    """Executes a round on this rank, without a wait for the device; every rank calls it with the same moves.
    ``tensors``: this rank's experts ``[count, …]`` each, contiguous, in any format; ``staging``: uint8 ``[staged,
    expert_bytes(tensors)]``."""
    received = [move for move in moves if move.target == group.index]
    sends = [
        (piece, move.target)
        for move in moves
        if move.source == group.index != move.target
        for piece in _pieces(tensors, move.source_slot)
    ]
    receives = []
    for move, row in zip(received, staging, strict=False):
        pieces = _pieces(tensors, move.source_slot if move.source == group.index else move.target_slot)
        parts = row.split([piece.numel() for piece in pieces])
        if move.source == group.index:
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece)
        else:
            receives += [(part, move.source) for part in parts]
    group.exchange(sends, receives)
    for move, row in zip(received, staging, strict=False):
        pieces = _pieces(tensors, move.target_slot)
        for part, piece in zip(row.split([piece.numel() for piece in pieces]), pieces, strict=True):
            piece.copy_(part)


def _pieces(tensors: Sequence[torch.Tensor], slot: int) -> list[torch.Tensor]:
    """uint8 views of one expert's part of each tensor."""
    return [tensor[slot : slot + 1].view(torch.uint8).view(-1) for tensor in tensors]
