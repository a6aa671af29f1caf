"""The forms of context parallelism on the ranks of the run: outputs compared, bytes and work counted, runs timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from context_parallel.division import Division, imbalance
from context_parallel.form import CPForm, PairCounts
from context_parallel.gathered import Contiguous, HeadTail
from context_parallel.layer import Layer, Tokens
from context_parallel.ring import Ring
from context_parallel.sent_bytes import SentBytes
from context_parallel.ulysses import Ulysses
from dsa_engine.measure.device import give_back_free_memory, peak_bytes, reset_peak
from dsa_engine.parallel import Mesh

FORMS: dict[str, type[CPForm]] = {form.name: form for form in (HeadTail, Contiguous, Ulysses, Ring)}

# Relative error of all rows together. Rounding sometimes changes the last selected token at a near tie, which changes
# single rows by a hundredth; in float32 the median row may differ only by a hundredth of this.
MAX_ERROR = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class FormResult:
    """One form at one length: values of the slowest rank, or maxima over the ranks."""

    form: str
    length: int
    ranks: int
    seconds: list[float]  # one per repeat
    sent_bytes: int  # counted during a run
    sent_bytes_by_formula: int
    imbalance: float  # largest counted work of a rank over the mean
    imbalance_by_formula: float
    added_bytes: int  # peak memory of a run above that before it
    relative_error: float  # error of all ranks' outputs against a single process
    median_row_error: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median_ms": statistics.median(self.seconds) * 1e3}


@dataclass
class _Case:
    """A form with its part of a sequence."""

    form: CPForm
    division: Division
    tokens: Tokens

    def run(self) -> torch.Tensor:
        return self.form.run(self.division, self.tokens)


class ContextParallelStudy:
    """The forms over one layer, on all ranks of a mesh.

    Args:
        layer: the layer, equal on every rank.
        mesh: a mesh of two ranks or more.
        names: names of the forms, keys of :data:`FORMS`.

    Raises:
        ValueError: one rank only, or a form that these ranks cannot run.
    """

    def __init__(self, layer: Layer, mesh: Mesh, names: Sequence[str]):
        self.layer, self.mesh = layer, mesh
        if mesh.world_size == 1:
            raise ValueError(
                "one rank has nothing to divide; start several: torchrun --nproc-per-node 2 "
                "scripts/studies/compare_context_parallel.py"
            )
        self.forms = [FORMS[name](layer, mesh.world) for name in names]
        for form in self.forms:  # creates everything that is created on first use
            self._case(form, 2 * mesh.world_size).run()

    def measure(self, length: int, repeat: int) -> list[FormResult]:
        """Runs every form once to compare its output with a single process and to count bytes, work and memory; then
        ``repeat`` times in turn for its time. Every rank calls it and gets the same results.

        Raises:
            RuntimeError: an output differs; then nothing is timed.
        """
        cases = [self._case(form, length) for form in self.forms]
        expected = {
            layout: self.layer.single_process(
                Division(length, self.mesh.world_size, layout).segments[self.mesh.rank], length
            )
            for layout in dict.fromkeys(form.layout for form in self.forms)
        }
        checked = [self._check(case, expected[case.form.layout].double()) for case in cases]
        seconds: list[list[float]] = [[] for _ in cases]
        for _ in range(repeat):
            for times, case in zip(seconds, cases, strict=True):
                times.append(max(self._of_all(self._seconds(case.run))))
        return [FormResult(seconds=times, **measured) for times, measured in zip(seconds, checked, strict=True)]

    def _case(self, form: CPForm, length: int) -> _Case:
        division = Division(length, self.mesh.world_size, form.layout)
        return _Case(form, division, self.layer.tokens(division.segments[self.mesh.rank]))

    def _check(self, case: _Case, expected: torch.Tensor) -> dict[str, Any]:
        """All fields of a :class:`FormResult` except times."""
        form, division, size, ranks = case.form, case.division, self.layer.size, self.mesh.world_size
        form.work = PairCounts()
        give_back_free_memory()
        reset_peak(self.layer.device)
        before = peak_bytes(self.layer.device)
        with SentBytes(ranks) as sent:
            out = case.run()
        added = peak_bytes(self.layer.device) - before
        done, form.work = form.work, None
        error, row_error = self._errors(out.double(), expected)
        max_error = MAX_ERROR[self.layer.dtype]
        if not (
            error <= max_error and row_error <= (max_error / 100 if self.layer.dtype == torch.float32 else max_error)
        ):
            raise RuntimeError(
                f"{form.name} differs from the single process at {division.length} tokens, by {error:.1e} in all and "
                f"{row_error:.1e} in the median row: not timed"
            )
        planned = [form.work_of(size, division, rank).flops(size) for rank in range(ranks)]
        collectives = form.collectives(size, division, self.layer.dtype.itemsize)
        return {
            "form": form.name,
            "length": division.length,
            "ranks": ranks,
            "sent_bytes": int(max(self._of_all(sent.total))),
            "sent_bytes_by_formula": sum(collective.bytes_sent for collective in collectives),
            "imbalance": imbalance(self._of_all(done.flops(size))),
            "imbalance_by_formula": imbalance(planned),
            "added_bytes": int(max(self._of_all(added))),
            "relative_error": error,
            "median_row_error": row_error,
        }

    def _errors(self, out: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
        """Relative errors: of all rows together, and the largest one of a rank's median row."""
        difference, norm = (out - expected).flatten(1).norm(dim=1), expected.flatten(1).norm(dim=1)
        whole = [sum(self._of_all(float(x.square().sum()))) for x in (difference, norm)]
        median = float((difference / norm).median()) if len(norm) else 0.0
        return (whole[0] / whole[1]) ** 0.5, max(self._of_all(median))

    def _seconds(self, run: Callable[[], torch.Tensor]) -> float:
        self._of_all(0.0)  # all ranks begin together
        self._wait()
        begin = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - begin

    def _of_all(self, value: float) -> list[float]:
        """A number from every rank."""
        mine = torch.tensor([value], dtype=torch.float64, device=self.mesh.device)
        return self.mesh.world.all_gather(mine).tolist()

    def _wait(self) -> None:
        if self.layer.device.type == "cuda":
            torch.cuda.synchronize(self.layer.device)
