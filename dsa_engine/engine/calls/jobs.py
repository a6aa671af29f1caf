"""Jobs: work that has the engine for itself, such as the logits of a prompt, and what waits for all requests to end."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dsa_engine.engine.requests.request import Request
from dsa_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from dsa_engine.engine.engine import Engine

Job = Literal["prefill", "prompt_logits", "reset_prefix_cache", "wait"]


@dataclass(frozen=True)
class Run:
    """The message of a job: it waits for the requests before it, and the requests after it wait. ``call``: the number
    of a call that every rank makes, see :class:`.spmd.SpmdCalls`; None: rank 0 makes it alone."""

    id: int
    job: Job  # see ``run_job``; "wait" computes nothing
    prompt_ids: Sequence[int]
    call: int | None = None


def run_job(engine: Engine, run: Run) -> Generator[None, None, torch.Tensor]:
    """Computes a chunk of a prompt at each ``next``, and returns float32 CPU logits: of a "prefill" ``[vocab]`` after
    the last token, of "prompt_logits" ``[len, vocab]`` at every position. The prompt's pages are free when the job ends
    or is closed."""
    import torch

    engine.check_idle()
    prompt, logits = run.prompt_ids, torch.empty(0)
    if run.job == "reset_prefix_cache":
        engine.scheduler.prefix_cache.reset()
    if run.job in ("wait", "reset_prefix_cache"):
        return logits
    if run.job == "prompt_logits":
        logits = torch.empty(len(prompt), engine.config.vocab_size, dtype=torch.float32)
    block = max(1, engine.workspace // (8 * engine.config.vocab_size))  # rows whose logits are made at a time
    request = Request(-1, prompt, SamplingParams(max_tokens=1), reads_prefix_cache=False)
    with engine.progress(len(prompt), "tokens", "prefill") as bar:
        try:
            engine.scheduler.add(request)
            while not request.prefilled:
                step = engine.scheduler.schedule()
                (chunk,) = step.chunks
                with engine.moving([chunk]):
                    if run.job == "prompt_logits":
                        engine.runner.all_logits(chunk, logits, block)
                    elif (last := engine.runner.last_logits(chunk)) is not None:
                        logits = last
                for hook in engine.after_launch:
                    hook([chunk])
                engine.scheduler.launched(step)
                bar.update(chunk.length)
                yield
        finally:
            engine.finish(request, "length" if request.prefilled else "abort")
    return logits.cpu()


def prefill(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """Prefills one prompt alone, without the engine's loop, and frees its pages; returns float32 CPU logits ``[vocab]``
    after the last token, the same on every rank."""
    engine.limits.check(prompt)
    job = run_job(engine, Run(-1, "prefill", prompt))
    while True:
        try:
            next(job)
        except StopIteration as end:
            return check_finite(end.value)


def check_finite(logits: torch.Tensor) -> torch.Tensor:
    """Returns ``logits [vocab]`` or ``[len, vocab]`` on the host, none of which is infinite or NaN."""
    # The sum reads them once. Only if it is not finite (it may overflow), each is checked.
    if not bool(logits.sum().isfinite()) and not bool((finite := logits.isfinite().all(dim=-1)).all()):
        where = "after the prompt" if logits.dim() == 1 else f"at position {int((~finite).nonzero()[0])} of the prompt"
        raise ValueError(f"the model's logits {where} are not finite (inf or nan)")
    return logits
