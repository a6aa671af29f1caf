"""The order in which the micro-batches of a step pass through the layers.

A pass is a generator: it launches stages, and yields the name of a stage whose transfer it has just started and whose
result it needs next. Each micro-batch runs up to its next transfer, then the other one does. In an MoE layer that is::

    first micro-batch   second micro-batch                           travels
    … dispatch                                                       tokens of the first
                        combine, attention, gate, dispatch           and of the second
    experts                                                          sums of the first
                        experts                                      and of the second
    combine, attention, gate, dispatch                               tokens of the first, in the next layer

The first micro-batch is always ahead, so its cache rows of a layer are stored before the second one reads them. A step
that is not cut is one pass, and its stages follow one another.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Pass = Generator[str, None, Result]  # yields names of `profile_stages.STAGES`


def run_interleaved(passes: Sequence[Pass[Result]]) -> list[Result]:
    """Runs the passes to their ends, round-robin up to the next transfer of each; returns their results."""
    results: dict[int, Result] = {}
    while len(results) < len(passes):
        for number, one in enumerate(passes):
            if number not in results:
                try:
                    next(one)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(passes))]
