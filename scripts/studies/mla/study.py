"""Comparison of the forms of MLA: work of a step counted, outputs checked, time measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from dsa_engine.measure.device import peak_bytes, reset_peak
from dsa_engine.measure.plots import load_pyplot, save
from mla.forms import FORMS, PAGE_SIZE, Cache, EngineForm, MLAForm, MLASize, MLAWeights


@dataclass(frozen=True)
class Counts:
    """Bytes and operations of one step of a form."""

    cache_bytes_per_token: float  # in one layer, in bfloat16
    flops_per_cached_token: float  # two for a multiply-add
    flops_per_new_token: float  # projections, independent of the context
    weight_bytes: int  # read by a step, in bfloat16


def count(form: type[MLAForm], size: MLASize) -> Counts:
    """Counted from the products and tensors of two steps with different contexts."""
    device = "cpu" if form is EngineForm else "meta"  # the kernel's loops need values of sizes, the others only shapes
    made = form(MLAWeights.random(size, torch.bfloat16, device))
    few, more = (_step_counts(made, tokens, device) for tokens in (PAGE_SIZE, 2 * PAGE_SIZE))
    flops = (more[0] - few[0]) / PAGE_SIZE
    return Counts(
        cache_bytes_per_token=(more[1] - few[1]) / PAGE_SIZE,
        flops_per_cached_token=flops,
        flops_per_new_token=few[0] - flops * PAGE_SIZE,
        weight_bytes=sum(weight.nbytes for weight in made.weights),
    )


def _step_counts(form: MLAForm, tokens: int, device: str) -> tuple[int, int]:
    """Floating-point operations of a step over so many cached tokens, and the bytes of their cache rows."""
    size = form.size
    zeros = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for shape in (
        (1, tokens, size.kv_rank), (1, tokens, size.rope), (1, size.q_rank)
    )]  # fmt: skip
    angles = torch.zeros(1, size.rope // 2, device=device)
    cache = form.cache(*zeros[:2])
    with FlopCounterMode(display=False) as counter:
        form.decode(zeros[2], angles, angles, cache)
    return counter.get_total_flops(), cache_bytes(cache)


def cache_bytes(cache: Cache) -> int:
    """Bytes of the rows in a form's cache; block tables are not counted."""
    return sum(part.nbytes for part in cache if isinstance(part, torch.Tensor) and part.is_floating_point())


@dataclass(frozen=True)
class FormResult:
    """One form with one batch and context."""

    form: str
    batch_size: int
    context: int
    seconds: list[float]  # one per repeat
    cache_bytes: int
    added_bytes: int  # peak memory of a step above that before it
    relative_error: float  # error of the output against the first form

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"median_ms": statistics.median(self.seconds) * 1e3}


class MLAStudy:
    """The forms over one layer's weights.

    Args:
        size: sizes of the layer.
        dtype, device: dtype and device of weights, caches and products.
        seed: seed of weights, caches and queries.
    """

    def __init__(self, size: MLASize, dtype: torch.dtype, device: torch.device, seed: int = 0):
        self.size, self.dtype, self.device = size, dtype, device
        weights = MLAWeights.random(size, dtype, device, seed)
        self.forms = [form(weights) for form in FORMS]
        self._generator = torch.Generator(device).manual_seed(seed + 1)

    def measure(self, batch_size: int, context: int, repeat: int, max_error: float) -> list[FormResult]:
        """Runs every form once for its output, then ``repeat`` times in turn for its time.

        Raises:
            RuntimeError: outputs differ by more than ``max_error``, relative; then nothing is timed.
        """
        latent = self._randn(batch_size, context, self.size.kv_rank)
        rotated = self._randn(batch_size, context, self.size.rope)
        q_latent = self._randn(batch_size, self.size.q_rank)
        angle = torch.arange(self.size.rope // 2, device=self.device).float().expand(batch_size, -1)
        caches = [form.cache(latent, rotated) for form in self.forms]
        steps = [_step(form, q_latent, angle.cos(), angle.sin(), c) for form, c in zip(self.forms, caches, strict=True)]
        outputs, added = zip(*(self._added(step) for step in steps), strict=True)
        errors = [_relative_error(out, outputs[0]) for out in outputs]
        for form, error in zip(self.forms, errors, strict=True):
            if not error <= max_error:
                raise RuntimeError(f"{form.name} differs from {self.forms[0].name} by {error:.1e}: not timed")
        seconds: list[list[float]] = [[] for _ in steps]
        for _ in range(repeat):
            for one, step in zip(seconds, steps, strict=True):
                one.append(self._seconds(step))
        return [
            FormResult(form.name, batch_size, context, times, cache_bytes(cache), more, error)
            for form, times, cache, more, error in zip(self.forms, seconds, caches, added, errors, strict=True)
        ]

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, dtype=self.dtype, device=self.device)

    def _added(self, step: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, int]:
        reset_peak(self.device)
        before = peak_bytes(self.device)
        out = step()
        self._wait()
        return out, peak_bytes(self.device) - before

    def _seconds(self, step: Callable[[], torch.Tensor]) -> float:
        self._wait()
        begin = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _step(
    form: MLAForm, q_latent: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: Cache
) -> Callable[[], torch.Tensor]:
    return lambda: form.decode(q_latent, cos, sin, cache)


def _relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def plot_mla(counts: dict[str, Counts], results: Sequence[FormResult], path: str, title: str) -> None:
    """Left: time of a step against the context, a line for each form, at the largest batch. Right: bytes and operations
    per cached token."""
    pyplot = load_pyplot()
    figure, (times, counted) = pyplot.subplots(1, 2, figsize=(13, 4.6), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    batch = max(r.batch_size for r in results)
    contexts = sorted({r.context for r in results})
    for name in counts:
        rows = [r for r in results if r.form == name and r.batch_size == batch]
        times.plot(contexts, [statistics.median(r.seconds) * 1e3 for r in rows], marker="o", label=name)
    times.set(xscale="log", yscale="log", xlabel="cached tokens of a sequence", ylabel=f"a step of batch {batch}, ms")
    times.set_xticks(contexts, [f"{n:,}" for n in contexts])
    times.grid(alpha=0.3)
    times.legend(fontsize="small")
    ticks = range(len(counts))
    for shift, label, values in (
        (-0.2, "cache bytes", [c.cache_bytes_per_token for c in counts.values()]),
        (0.2, "operations", [c.flops_per_cached_token for c in counts.values()]),
    ):
        counted.bar([i + shift for i in ticks], values, 0.38, label=label)
    counted.set_xticks(ticks, list(counts), fontsize="small")
    counted.set(yscale="log", ylabel="bytes, operations", title="Per cached token and layer, one query (counted)")
    counted.legend(fontsize="small")
    save(figure, path)
