"""The checks of ``dsa-engine check``: an engine, and its checkpoint. Every rank calls :func:`findings`."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from itertools import chain
from pathlib import Path

from dsa_engine.commands.check.layer import Agreement, PageLayer
from dsa_engine.commands.check.watch import Watch
from dsa_engine.commands.doctor.checks import Finding
from dsa_engine.engine.engine import Engine
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.startup.weights import why_dense
from dsa_engine.parallel.group import Group
from dsa_engine.sampling_params import SamplingParams

_TRAINED = 0.85  # a trained model's loss on a text, in that of a uniform choice
_REPORT = "report it, with the JSON of this check"


def findings(
    engine: Engine, folder: Path, ids: Sequence[int], is_text: bool, layers: Sequence[int]
) -> Generator[Finding, None, list[Agreement]]:
    """Makes all checks with requests that begin as ``ids`` do; returns what was compared."""
    mesh, ranks, base = engine.mesh, engine.mesh.host, list(ids[:-2])
    engine.async_scheduling = False  # steps are watched one by one
    yield _unread(engine, ranks)
    topk, page = engine.config.index_topk, engine.cache.page_size
    # Rows where something changes: beyond index_topk, at a page's border, at the end; and some between.
    borders = sorted({end for end in (topk, (topk // page + 2) * page) if 3 < end < len(ids) - 4} | {len(base)})
    wanted = {0, 1, page - 1, page, *(end + step for end in borders for step in (-2, -1, 0, 1))}
    wanted |= {topk + (len(base) - topk) * part // 9 for part in range(1, 9)}
    watch = Watch(engine, layers, {at for at in wanted if 0 <= at <= len(base)}, ranks)
    with watch.running():
        done = {"prefill": _run(engine, [base], 2, prompt_logprobs=0)}
        prefill = done["prefill"][0]
        yield _sparsity(engine, folder, prefill, len(ids))
        done["decode"] = _run(engine, [base[: borders[0] + step] for step in (-1, 0, 1)], 2)
        if engine.options.enable_prefix_caching:
            done["prefix hit"] = _run(
                engine, [base[: end + step] for end in borders for step in (-1, 0, 1)], 2, hits=True
            )
        done["preempted"] = _run(engine, [base[: end - 2] for end in borders], 4, preempt=True)
        if engine.runner.num_drafts:
            done["drafts"] = _run(engine, [base[: end - 3] for end in borders], 5)
    compared, rows = list[Agreement](), watch.take()
    with engine.progress(len(layers), "layers", "comparing with reference/dsa.py") as bar:
        for layer in list(layers)[mesh.rank :: mesh.world_size]:
            compared += PageLayer(folder, engine, layer).compare(done, rows)
            bar.update(mesh.world_size)
    compared = sorted(chain(*ranks.all_gather_object(compared)), key=lambda one: one.layer)
    if ties := [one.ties for one in compared if one.ties is not None]:
        seen = "of the selections end in a tie: the smallest positions win, torch.topk may take others"
        yield Finding("ties", True, f"{sum(ties) / len(ties):.1%} {seen}")
    text = _text(prefill, is_text, math.log(engine.config.vocab_size))
    yield text
    for layer in layers:
        yield _layer(layer, [one for one in compared if one.layer == layer], bool(text.ok))
    return compared


def _run(
    engine: Engine, prompts: Sequence[list[int]], max_tokens: int, *, hits: bool = False, preempt: bool = False,
    prompt_logprobs: int | None = None,
) -> list[Request]:  # fmt: skip
    """Generates greedily for prompts together, without the engine's loop; every rank calls it. ``hits``: pages of the
    prefix cache are used; ``preempt``: each request loses its pages once, when it has two tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    requests = [engine.add(prompt, params) for prompt in prompts]
    for request in requests:
        request.reads_prefix_cache = hits or preempt
        request.tracked = True  # all ranks preempt at the same token
    while engine.has_work:
        engine.step()
        for request in requests if preempt else ():
            if len(request.output) >= 2 and not request.preemptions and request.finish_reason is None:
                engine.scheduler.preempt(request)
    if errors := [request.error for request in requests if request.error is not None]:
        raise RuntimeError(f"a request of the check failed: {errors[0]}")
    return requests


def _unread(engine: Engine, ranks: Group) -> Finding:
    names = sorted(set.intersection(*map(set, ranks.all_gather_object(engine.model.unread))))
    used = tuple(f"model.layers.{layer}." for layer in range(engine.config.num_hidden_layers))
    names = [name for name in names if name.startswith(used) or not name.startswith("model.layers.")]
    rest = [name for name in names if not name.endswith((".inv_freq", ".weight_shape"))]
    seen = f"nothing has read {len(rest)}: {', '.join(rest[:4])} …" if rest else "the model's are read"
    return _judged("tensors", not rest, seen, "config.json does not imply them: compare it with the release")


def _sparsity(engine: Engine, folder: Path, request: Request, tokens: int) -> Finding:
    topk, (mha, dense, sparse) = engine.config.index_topk, request.rows_by_form
    seen = f"of {mha + dense + sparse:,} rows {mha:,} are in MHA, {dense:,} in dense and {sparse:,} in sparse form"
    if why := why_dense(folder, engine.config, engine.options, engine.max_model_len):
        return Finding("sparsity", False, f"not in use: {why}", "raise max_model_len, or get the right config.json")
    if tokens <= topk + 1 or not topk:
        return Finding("sparsity", None, f"not in use, by index_topk {topk} and --tokens {tokens}; {seen}")
    return _judged("sparsity", sparse == tokens - 1 - (0 if engine.options.batch_invariant else topk), seen, _REPORT)


def _text(prefill: Request, is_text: bool, uniform: float) -> Finding:
    """Whether the model is trained, by its loss on a text: engine and page may share a fault of the checkpoint."""
    of_tokens = zip((prefill.prompt_logprobs or [])[1:], prefill.prompt[1:])
    losses = [-float(of[token]) for of, token in of_tokens if of is not None]
    loss = sum(losses) / len(losses)
    trained = is_text and loss < _TRAINED * uniform
    seen = f"{loss:.2f} nats a token, a uniform choice {uniform:.2f}" if is_text else "the model has no tokenizer"
    return Finding("text", trained or None, seen if trained else f"{seen}: the mass of a selection is not judged")


def _layer(layer: int, cases: Sequence[Agreement], trained: bool) -> Finding:
    """All cases of a layer, by its worst numbers; the mass that a selection carries is that of the prefill."""
    named = ((one.case, text.partition(":")[0], text) for one in cases for text in one.wrong)
    wrong = list({(case, part): f"{case}: {text}" for case, part, text in named}.values())  # one text of each
    if wrong and not any(one.wrong for one in cases if one.case == "prefill"):
        wrong.insert(0, "the prefill is right, so it is the cache or the form of the step")
    errors = (max(getattr(one, part) for one in cases) for part in ("attention", "feed_forward"))
    seen = "errors up to {:.1e} in attention, {:.1e} after it".format(*errors)
    for part in ("selection", "experts"):
        if known := [rate for one in cases if (rate := getattr(one, part)) is not None]:
            seen += f"; {min(known):.1%} of the {part} as the page's"
    advice = _REPORT
    for one in cases:
        if one.case == "prefill" and one.mass is not None and one.random and one.recent:
            seen += f"; {one.mass:.1%} of dense attention's mass, random {one.random:.1%}, the last {one.recent:.1%}"
            least = max(one.recent - 0.05, one.random + 0.25 * (1 - one.random))
            if trained and one.mass <= least and not wrong:
                wrong, advice = [seen], "the indexer's weights are damaged: get the files again"
    return _judged(f"layer {layer}", not wrong, "; ".join(wrong) or seen, advice)


def _judged(name: str, ok: bool | None, seen: str, advice: str) -> Finding:
    return Finding(name, ok, seen, advice if ok is False else "")
