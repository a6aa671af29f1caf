"""Machine code (SASS) as ``cuobjdump -sass`` prints it: instructions and their loops.

Loops are the natural loops of the control-flow graph. Not every backward jump is a loop: compilers put rarely executed
code after the end of a kernel and jump back from there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P[0-9T]+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")


class Instruction(NamedTuple):
    """``predicate`` is such as "@!P3", or empty."""

    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def target(self) -> int | None:
        """Target address of a branch."""
        target = _TARGET.search(self.operands) if self.opcode.startswith("BRA") else None
        return int(target[1], 16) if target else None

    @property
    def conditional(self) -> bool:
        """Whether the next instruction may follow: by a predicate before it or, in a branch, among its operands."""
        return bool(self.predicate) or re.search(r"\bU?P[0-9T]", self.operands) is not None


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop in the order of their addresses, and those of them that run in each iteration."""

    body: tuple[Instruction, ...]
    always: tuple[Instruction, ...]


def instructions(text: str) -> list[Instruction]:
    """Instructions of the one kernel in the text.

    Raises:
        ValueError: there are none.
    """
    code = [Instruction(int(address, 16), *rest) for address, *rest in _LINE.findall(text)]
    if not code:
        raise ValueError(f"no SASS in {text[:80]!r}; give what `cuobjdump -sass` prints of a cubin")
    return code


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """All loops of a kernel, in the order of their heads, but for the jump to itself that pads the end."""
    blocks = _blocks(code)
    following = _following(blocks)
    dominators = _dominators(following)
    sources: dict[int, set[int]] = {}
    for block, targets in enumerate(following):
        for head in targets:
            if block in dominators and head in dominators[block] and not _pads(blocks[block]):
                sources.setdefault(head, set()).add(block)
    inner = []
    for head in sorted(sources):
        body = _natural(head, sources[head], following)
        each_time = set.intersection(*(dominators[block] for block in sources[head])) & body
        inner.append(Loop(*(tuple(i for b in sorted(chosen) for i in blocks[b]) for chosen in (body, each_time))))
    return inner


def _pads(block: Sequence[Instruction]) -> bool:
    return len(block) == 1 and block[0].target == block[0].address


def _blocks(code: Sequence[Instruction]) -> list[list[Instruction]]:
    starts = {instruction.target for instruction in code}
    blocks: list[list[Instruction]] = [[]]
    for instruction in code:
        if instruction.address in starts and blocks[-1]:
            blocks.append([])
        blocks[-1].append(instruction)
        if instruction.target is not None or instruction.opcode in ("EXIT", "RET") or "RET." in instruction.opcode:
            blocks.append([])
    return [block for block in blocks if block]


def _following(blocks: Sequence[Sequence[Instruction]]) -> list[list[int]]:
    """The blocks that may follow each."""
    number = {block[0].address: i for i, block in enumerate(blocks)}
    following = []
    for i, block in enumerate(blocks):
        last = block[-1]
        targets = [number[last.target]] if last.target in number else []
        leaves = last.target is not None or last.opcode.split(".")[0] in ("EXIT", "RET")
        if (not leaves or last.conditional) and i + 1 < len(blocks):
            targets.append(i + 1)
        following.append(targets)
    return following


def _dominators(following: Sequence[Sequence[int]]) -> dict[int, set[int]]:
    """Dominators of every reachable block: the blocks on every path to it, itself included."""
    before: dict[int, list[int]] = {0: []}
    order, todo = [0], [0]
    while todo:
        block = todo.pop()
        for target in following[block]:
            if target not in before:
                before[target] = []
                order.append(target)
                todo.append(target)
            before[target].append(block)
    dominators = {block: {0} if block == 0 else set(order) for block in order}
    changed = True
    while changed:
        changed = False
        for block in order[1:]:
            now = {block} | set.intersection(*(dominators[b] for b in before[block]))
            changed |= now != dominators[block]
            dominators[block] = now
    return dominators


def _natural(head: int, sources: set[int], following: Sequence[Sequence[int]]) -> set[int]:
    """The blocks from which a source of the loop is reached without passing its head."""
    body, todo = {head}, list(sources)
    while todo:
        block = todo.pop()
        if block not in body:
            body.add(block)
            todo += [b for b, targets in enumerate(following) if block in targets]
    return body
