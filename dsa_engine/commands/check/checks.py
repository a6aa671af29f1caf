"""The checks of ``dsa-engine check``: a model that is loaded, and its checkpoint. Every rank calls :func:`findings`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from dsa_engine.commands.check.agreement import Agreement, LayerComparison, Recall
from dsa_engine.commands.check.evidence import Other, experts_follow_router, odd_weights, try_others, unlike_released
from dsa_engine.commands.check.plain import PlainModel
from dsa_engine.commands.check.watch import Rows, Watch, joined, run
from dsa_engine.commands.doctor.checks import Finding
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.startup.weights import why_dense
from dsa_engine.llm import LLM
from dsa_engine.parallel.group import Group, new_group

_LONG = 4096
_WRITING_S = 60.0  # longest wait for the disk
_TRAINED = 0.85  # a trained model's loss on a text, in that of a uniform choice
_FOLLOW = 2.0  # standard deviations, see `experts_follow_router`
_AGAIN, _RELEASE = "get the files again", "compare config.json with the release"
_REPORT = "report it, with the JSON of this check"


@dataclass
class Report:
    """What was measured; the findings follow from it."""

    agreements: list[Agreement] = field(default_factory=list)
    recalls: list[Recall] = field(default_factory=list)
    experts: list[tuple[int, float]] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)
    loss: float = math.nan
    others: list[Other] = field(default_factory=list)


class Cases:
    """Runs the cases, one after the other, and collects their rows.

    Args:
        ids: a text of ``tokens`` tokens; all requests begin with it.
    """

    def __init__(self, llm: LLM, ids: Sequence[int], tokens: int, layers: Sequence[int], ranks: Group):
        self._engine, self._ids = llm.engine, list(ids[: tokens - 2])
        topk, page = self._engine.config.index_topk, self._engine.cache.page_size
        # Where something changes: beyond index_topk, at 4,096, at a page's border, at the end.
        borders = {one for one in (topk, _LONG, (topk // page + 2) * page) if 3 < one < tokens - 4}
        self.borders = sorted(borders | {tokens - 2})
        spread = [topk + (tokens - topk) * part // 9 for part in range(1, 9)]
        near = [at + step for at in self.borders for step in range(-2, 2)]
        wanted = {at for at in (0, 1, page - 1, page, *near, *spread) if 0 <= at < tokens - 1}
        self.watch = Watch(self._engine, layers, wanted, ranks)
        self.done: dict[str, list[Request]] = {}
        self.skipped: dict[str, str] = {}
        self.rows: Rows = {}

    @property
    def prefill(self) -> Request:
        """The request that has computed all tokens."""
        return self.done["prefill"][0]

    def run(self, tick: Callable[[], object]) -> None:
        """Runs every case that is possible."""
        ids, at, engine = self._ids, self.borders, self._engine
        hits, around = [ids[:one] for one in at], {one + step for one in at for step in (-1, 0, 1)} - {at[-1] + 1}
        off = "" if engine.options.enable_prefix_caching else "enable_prefix_caching is off"
        drafts = "" if engine.runner.num_drafts else "no speculative_config"
        no_host = "" if engine.scheduler.ledger.slots else "no host_cache_memory"
        no_disk = "" if engine.cache_steps.stores else "no cache_folder"
        cases: list[tuple[str, str, Callable[[], list[Request]]]] = [
            ("prefill", "", lambda: run(engine, [ids], 2, reads=False)),
            ("decode", "", lambda: run(engine, [ids[: at[0] + step] for step in (-1, 0, 1)], 2, reads=False)),
            ("prefix hit, device", off, lambda: run(engine, [ids[:end] for end in sorted(around)], 2)),
            ("prefix hit, host", no_host, lambda: run(engine, hits, 2)),
            ("prefix hit, disk", no_disk, lambda: run(engine, hits, 2)),
            ("preempted", "", lambda: run(engine, [ids[: end - 2] for end in at], 4, preempt=True)),
            ("drafts", drafts, lambda: run(engine, [ids[: end - 3] for end in at], 5)),
        ]
        for name, reason, case in cases:
            if not reason:
                self._prepare(name)
                with self.watch.running():
                    self.done[name] = case()
                self.rows |= self.watch.take()
                if name.startswith("prefix hit") and not any(one.num_cached_tokens for one in self.done[name]):
                    reason = "no page was there"
            if reason:
                self.skipped[name] = reason
            tick()

    def _prepare(self, name: str) -> None:
        """Lets the pages of the prefill be in host memory only, or on the disk only."""
        engine, stores = self._engine, self._engine.cache_steps.stores
        if name == "prefix hit, host":
            for pool in engine.scheduler.ledger.pools:  # what it held goes to host memory
                pool.release(pool.take(pool.free))
        if name == "prefix hit, disk" and stores is not None and self.prefill.digests is not None:
            wanted = self.prefill.digests.values[: self.borders[0] // engine.cache.page_size]
            since = time.monotonic()
            while not all(map(stores.folder.has, wanted)) and time.monotonic() - since < _WRITING_S:
                time.sleep(0.05)
            engine.mesh.all_gather_int(0)
            engine.scheduler.prefix_cache.reset()

    def look_at(self, plain: PlainModel, layer: int, report: Report) -> None:
        """Adds what a layer's rows tell to the report."""
        config, base, comparison = plain.config, self.prefill.id, LayerComparison(self._engine, plain)
        h = joined(self.rows[base, layer, "h"])[1]
        for name, requests in self.done.items():
            for request in requests:
                if (request.id, layer, "attended") in self.rows:
                    cached = h[: request.num_cached_tokens or 0]
                    report.agreements.append(comparison.of(name, layer, request.id, self.rows, cached))
        report.odd += odd_weights(plain, layer)
        beyond = torch.linspace(config.index_topk, len(h) - 1, 64).long().unique()
        if config.indexer_types[layer] == "full" and len(h) > config.index_topk:
            report.recalls.append(comparison.recall(layer, h.float(), beyond))
        if config.mlp_layer_types[layer] == "sparse":
            at, attended = joined(self.rows[base, layer, "attended"])
            report.experts.append((layer, experts_follow_router(plain, layer, h[at].float() + attended.float())))


def findings(
    llm: LLM, ids: Sequence[int], is_text: bool, tokens: int, layers: Sequence[int]
) -> Iterator[Finding | Report]:
    """Makes all checks; the last item is the report."""
    engine, mesh, report = llm.engine, llm.engine.mesh, Report()
    config = engine.config
    engine.async_scheduling = False  # steps are watched one by one
    ranks = mesh.host
    if mesh.world_size > 1:  # the loop's messages wait on the ranks' own group
        ranks = Group(mesh.world.ranks, mesh.rank, new_group(mesh.world.ranks, mesh.config.timeout, "gloo"))
        if engine.cache_steps.loads is not None:
            engine.cache_steps.loads.group = ranks
    yield _unread(llm, ranks)
    differ = unlike_released(config)
    seen = "; ".join(differ) if differ else "all keys are those of the released model of these sizes"
    if differ is None:
        yield Finding("config", None, "no released model has these sizes")
    else:
        yield _judged("config", not differ, seen, _RELEASE)
    cases, plain = Cases(llm, ids, tokens, layers, ranks), PlainModel(llm.folder, config)
    with engine.progress(7, "cases", "running the engine") as bar:
        cases.run(bar.update)
    yield _sparsity(llm, cases.prefill, tokens)
    with engine.progress(len(layers), "layers", "comparing with plain float32") as bar:
        for layer in list(layers)[mesh.rank :: mesh.world_size]:
            cases.look_at(plain, layer, report)
            bar.update(mesh.world_size)
    parts = ranks.all_gather_object(report)
    for name in ("agreements", "recalls", "experts", "odd"):
        setattr(report, name, [*chain(*(getattr(one, name) for one in parts))])
    report.recalls.sort(key=lambda one: one.layer)
    report.experts.sort()
    yield _judged("weights", not report.odd, _some(report.odd) or "of a usual size", _AGAIN)
    for name in [*cases.done, *(name for name in cases.skipped if name not in cases.done)]:
        yield _agreement(name, report, cases.skipped.get(name))
    length = min(tokens - 2, config.index_topk + 1024)
    with engine.progress(None, "passes", "trying other values of config.json") as bar:
        report.loss, report.others = try_others(engine, ids[:length], bar.update)
    yield from _of_text(report, is_text, math.log(config.vocab_size))
    yield report


def _unread(llm: LLM, ranks: Group) -> Finding:
    names = sorted(set.intersection(*map(set, ranks.all_gather_object(llm.engine.model.unread))))
    prefixes = tuple(f"model.layers.{layer}." for layer in range(llm.engine.config.num_hidden_layers))
    others = [name for name in names if name.startswith("model.layers.") and not name.startswith(prefixes)]
    rest = [name for name in names if name not in others and not name.endswith((".inv_freq", ".weight_shape"))]
    seen = f"all are read but {len(others)} of MTP modules or layers that are not in use"
    seen = f"nothing has read {_some(rest)}" if rest else seen if others else "all are read"
    return _judged("tensors", not rest, seen, "config.json does not imply them: compare it with the release")


def _sparsity(llm: LLM, request: Request, tokens: int) -> Finding:
    engine, topk, (mha, dense, sparse) = llm.engine, llm.engine.config.index_topk, request.rows_by_form
    why = why_dense(llm.folder, engine.config, engine.options, engine.max_model_len)
    seen = f"of {mha + dense + sparse:,} rows {mha:,} are in MHA, {dense:,} in dense and {sparse:,} in sparse form"
    if why:
        return Finding("sparsity", False, f"not in use: {why}", "raise max_model_len, or get the right config.json")
    if tokens <= topk + 1 or not topk:
        return Finding("sparsity", None, f"not in use, by index_topk {topk} and --tokens {tokens}; {seen}")
    wanted = tokens - 1 - (0 if engine.options.batch_invariant else topk)
    return _judged("sparsity", sparse == wanted, seen, _REPORT)


def _agreement(name: str, report: Report, skipped: str | None) -> Finding:
    of_case = [one for one in report.agreements if one.case == name]
    if wrong := [f"layer {one.layer}: {text}" for one in of_case for text in one.wrong]:
        cached = not any(one.wrong for one in report.agreements if one.case == "prefill")
        seen = _some(wrong, 3) + ("; the prefill is right: it is the cache or the form of the step" if cached else "")
        return Finding(name, False, seen, _REPORT)
    if skipped is not None:
        return Finding(name, None, skipped)
    shared = [one.shared for one in of_case if one.shared is not None]
    rows, layers = sum(len(one.positions) for one in of_case), len({one.layer for one in of_case})
    attention, after = (max(getattr(one, part) for one in of_case) for part in ("attention", "feed_forward"))
    seen = f"{rows} rows of {layers} layers; largest error {attention:.1e} in attention, {after:.1e} after it"
    return Finding(name, True, seen + (f"; {min(shared):.2%} of choices are the definition's" if shared else ""))


def _of_text(report: Report, is_text: bool, uniform: float) -> Iterator[Finding]:
    """What a text tells of the checkpoint, if the model is trained."""
    better = [one for one in report.others if one.better]
    trained = is_text and report.loss - max((one.gain for one in better), default=0.0) < _TRAINED * uniform
    loss = f"{report.loss:.2f} nats a token, a uniform choice {uniform:.2f}"
    if trained:
        named = [f"{one.key}={one.value} is better by {one.gain:.2f} than {one.configured}" for one in better]
        yield _judged("text", not named, f"{loss}; {'; '.join(named) or 'no other value is better'}", _RELEASE)
    else:
        why = loss if is_text else "the model has no tokenizer"
        yield Finding("text", None, f"weights that are not trained tell nothing of config.json: {why}")
    for one in report.recalls:
        seen = (
            f"{one.selected:.1%} of dense attention's mass; random {one.random:.1%}, the last tokens {one.recent:.1%}"
        )
        wrong = ""
        if one.swapped > one.selected + 0.02:
            wrong = (
                f"{one.swapped:.1%} with the other index_rope_interleaved: the form of the indexer's RoPE is swapped"
            )
        elif one.selected < max(one.recent - 0.05, one.random + 0.25 * (1 - one.random)):
            wrong = "hardly better than random, or worse than the last tokens: the indexer's weights are damaged"
        elif one.wider > one.selected + 0.15:
            wrong = f"four times as many tokens carry {one.wider:.1%}: index_topk is too small"
        same = ", ".join(f"{form} keep {part:.1%}" for form, part in one.unchanged.items())
        seen += f"; {wrong}" if wrong and trained else f"; {same} of the choices"
        yield _judged(f"recall, layer {one.layer}", not wrong if trained else None, seen, _RELEASE)
    for layer, follows in report.experts:
        ok, answer = follows > _FOLLOW if trained else None, "experts answer where their router scores them high"
        seen = f"{answer}: {follows:.1f} standard deviations above a random order"
        seen = f"{seen}: their order is another" if ok is False else seen
        yield _judged(f"experts, layer {layer}", ok, seen, _AGAIN)


def _judged(name: str, ok: bool | None, seen: str, advice: str) -> Finding:
    return Finding(name, ok, seen, advice if ok is False else "")


def _some(texts: Sequence[str], count: int = 4) -> str:
    return "; ".join(texts[:count]) + (f"; and {len(texts) - count} more" if len(texts) > count else "")
