"""The order in which the halves of a step pass through the layers.

A pass is a generator: it launches stages, and yields the name of a stage whose transfer it has just started and whose
result it needs next. Each half runs up to its next transfer, then the other half does. In an MoE layer that is::

    first half     second half                                       travels
    … dispatch                                                       tokens of the first half
                   combine, attention, gate, dispatch                and of the second half
    experts                                                          sums of the first half
                   experts                                           and of the second half
    combine, attention, gate, dispatch                               tokens of the first half, in the next layer

The first half is always ahead, so its cache rows of a layer are stored before the second half reads them. A step that
is not cut is one pass, and its stages follow one another.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Pass = Generator[str, None, Result]  # yields names of `profile_stages.STAGES`


def run_interleaved(passes: Sequence[Pass[Result]]) -> list[Result]:
    """Runs the passes to their ends, in turn up to the next transfer of each; returns their results."""
    results: dict[int, Result] = {}
    while len(results) < len(passes):
        for number, one in enumerate(passes):
            if number not in results:
                try:
                    next(one)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(passes))]
