"""A plan as text: what to start, its figures, its limits, and the open assumptions."""

from __future__ import annotations

from dsa_engine.commands.planner.plan import ASSUMED_ACCEPTANCE, DRAFTS, NEAR, Demand, DeploymentPlan, NothingFits
from dsa_engine.commands.planner.prediction.deployment import UTILIZATION, Deployment
from dsa_engine.commands.planner.prediction.stages import StageTime
from dsa_engine.commands.planner.search import Planner
from dsa_engine.measure.report import format_table
from dsa_engine.system.sizes import format_bytes

NOT_KNOWN = (
    "queueing: TTFT is that of a prompt that finds its ranks free",
    "loads of experts: tokens choose them evenly here, unless --imbalance says what the busiest rank serves",
    "accuracy of fewer bits: see docs/QUANTIZATION.md",
)


def print_plan(title: str, plan: DeploymentPlan, demand: Demand, remedy: int | None = None) -> None:
    """Prints one plan: its cut, its figures beside the demand, and its stages; if it misses the demand,
    ``remedy`` is a sufficient number of devices."""
    print(f"\n{title}")
    if (misses := plan.misses(demand)) > 0:
        would = f"; {remedy:,} devices would do" if remedy else "; 8 times as many devices would not do either"
        print(f"  MISSES what was asked by {misses:.0%}" + ("" if plan.split else would))
    where = f"{plan.devices} of {demand.devices} devices"
    if plan.split:
        where += f": {plan.prefill_instances} to prefill × {plan.prefill.how.ranks} ranks, "
        where += f"{plan.decode_instances} to decode × {plan.decode.how.ranks} ranks"
    else:
        where += f": {plan.decode_instances} instance(s) of {plan.decode.how.ranks} ranks"
    rows = [("devices", where), ("prefill", _cut(plan.prefill.how, True)), ("decode", _cut(plan.decode.how, False))]
    rows += [
        ("TTFT", f"{plan.ttft:.3g} s" + _asked(demand.ttft, "s")),
        ("TPOT", f"{plan.tpot * 1e3:.3g} ms" + _asked(demand.tpot and demand.tpot * 1e3, "ms") + _waits(plan)),
        ("concurrent requests", f"{plan.requests:,}" + _asked(demand.requests, "")),
        ("output tokens/s", f"{plan.tokens_per_s:,.0f}, {plan.tokens_per_s / plan.devices:,.1f} a device"),
        ("chosen for", _chosen_for(plan)),
        ("bound by", plan.limit),
        ("memory left on a rank", f"{format_bytes(plan.decode.room)} in decode, of {UTILIZATION:.0%} of all"),
        ("redundant experts", f"{plan.replicas} a rank have room in that"),
    ]
    if (way := plan.handover) is not None:
        sent = f"{format_bytes(way.nbytes)} a request in {way.pages:,} pages: {way.seconds * 1e3:.3g} ms on the link, "
        rows.append(("handover", f"{sent}{way.exposed * 1e3:.3g} ms of it after the prefill"))
    if drafts := plan.decode.how.drafts:
        gained = f"{_acceptance(demand, drafts)}; {plan.decode.tokens_per_step:.2f} tokens a step"
        rows.append(("accepted drafts", gained))
    print("\n".join(f"  {name:<22} {text}" for name, text in rows))
    print("\n" + _stages(plan))


def print_not_fitting(title: str, error: NothingFits, remedy: int | None) -> None:
    """Prints by how much one request does not fit, and a remedy: ``remedy`` devices, if any number suffices."""
    how = error.nearest
    print(f"\n{title}")
    print(f"  DOES NOT FIT: the least ({_cut(how, True)}) lacks {format_bytes(error.lacking)} on each rank.")
    more = f"{remedy:,} devices, a" if remedy else "A"
    print(f"  What would make it fit: {more} device with more memory, shorter requests, or fewer bits.")


def print_what_is_not_known(planner: Planner, demand: Demand) -> None:
    print(f"\n{planner.device.name}: {planner.device.source}; {planner.reached.source}.")
    print("Not known, and not in these figures:")
    drafts = f"acceptance of drafts, by position: {_acceptance(demand, max(DRAFTS))}"
    print("\n".join(f"* {text}" for text in (*NOT_KNOWN, drafts)))


def _chosen_for(plan: DeploymentPlan) -> str:
    highest = plan.highest_rate
    if highest is None:
        return "the highest rate"
    other = f"TTFT {highest.ttft:.3g} s, TPOT {highest.tpot * 1e3:.3g} ms, cp {highest.prefill.how.cp_size}"
    return f"latency, within {NEAR:.0%} of the highest rate: {highest.tokens_per_s:,.0f} tokens/s, {other}"


def _acceptance(demand: Demand, drafts: int) -> str:
    rates = [demand.acceptance[min(i, len(demand.acceptance) - 1)] for i in range(drafts)]
    source = "assumed (--acceptance)" if demand.acceptance == ASSUMED_ACCEPTANCE else "as given"
    return f"{', '.join(f'{rate:.0%}' for rate in rates)}, {source}"


def _cut(how: Deployment, prefill: bool) -> str:
    parts = [f"ep {how.ranks}"]
    if prefill:
        parts += [f"cp {how.cp_size}", f"chunk {how.chunk:,}"]
    parts += [f"tp {how.tp_size}", _exchange(how), f"weights {how.weights}", f"caches {how.cache}"]
    if how.redundant:
        parts.append(f"{how.redundant} redundant experts")
    if prefill:
        return ", ".join(parts)
    return ", ".join([*parts, f"{how.drafts} drafts", *(["prefetch of weights"] if how.prefetch_weights else [])])


def _exchange(how: Deployment) -> str:
    parts = [how.dispatch]
    if how.dispatch_dtype == "fp8" and how.weights == "fp8":
        parts.append("tokens in fp8")
    if how.combine_dtype == "fp8" and how.dispatch != "all_gather":
        parts.append("sums in fp8")
    options = {"two batches": how.two_batches}
    return " + ".join((*parts, *(name for name, on in options.items() if on)))


def _asked(value: float | None, unit: str) -> str:
    return "" if value is None else f" (asked: {value:g}{' ' + unit if unit else ''})"


def _waits(plan: DeploymentPlan) -> str:
    between = plan.tpot - plan.decode.tpot
    return f", of which {between * 1e3:.3g} wait for prefills" if between > 0 else ""


def _stages(plan: DeploymentPlan) -> str:
    prefill, decode = plan.prefill.stages, plan.decode.stages
    rows: list[tuple[str, ...]] = []
    for name in dict.fromkeys((*prefill, *decode)):
        one, other = prefill.get(name), decode.get(name)
        rows.append((name, *_cells(one), *_cells(other)))
    cells: list[str] = []
    for stages in (prefill, decode):
        total, hidden = sum(s.seconds for s in stages.values()), sum(s.hidden for s in stages.values())
        cells += [f"{total * 1e3:.4g}", f"{hidden * 1e3:.3g}" if hidden else "", ""]
    rows.append(("all", *cells))
    header = ("stage", "prefill ms", "hidden", "limited by", "decode step ms", "hidden", "limited by")
    return format_table(header, rows)


def _cells(stage: StageTime | None) -> tuple[str, str, str]:
    if stage is None:
        return "", "", ""
    return f"{stage.seconds * 1e3:.3g}", f"{stage.hidden * 1e3:.3g}" if stage.hidden else "", stage.limit
