"""/metrics: the names of vLLM, and what they count."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dsa_engine import LLM, SamplingParams
from dsa_engine.engine.requests.limits import Capacity
from dsa_engine.engine.requests.request import Request
from dsa_engine.engine.requests.scheduler import Scheduler
from dsa_engine.engine.stats_log import StatsLog
from dsa_engine.server.metrics import _StateCollector


def values(server: Any) -> dict[str, float]:
    """The values of /metrics by name; of labels only those that tell several values apart are in the name."""
    from prometheus_client.parser import text_string_to_metric_families

    read = {}
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            apart = ("position", "finished_reason", "reason")
            words = [sample.name, *(v for k, v in sample.labels.items() if k in apart)]
            assert not sample.name.startswith("vllm:") or sample.labels["engine"] == "0", sample
            if "le" not in sample.labels:
                read[" ".join(words).removeprefix("vllm:")] = sample.value
    return read


@pytest.fixture(scope="module")
def drafting(tiny_llm: Callable[..., LLM]) -> LLM:
    return tiny_llm(400, speculative_config={"method": "mtp", "num_speculative_tokens": 2})


def test_what_is_counted(serve: Any, drafting: LLM) -> None:
    server = serve(drafting, served_model_name=["tiny"])
    before = values(server)
    assert before["num_requests_running"] == before["num_requests_waiting"] == before["kv_cache_usage_perc"] == 0
    given: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 1}
    server.complete([[5, 6, 7], [9] * 20], max_tokens=6, n=2, **given)
    server.post("/v1/completions", json={"prompt": [9] * 20, "max_tokens": 1, "stream": True, **given})
    server.complete([5], max_tokens=1, allowed_token_ids=[1])
    server.refused("/v1/completions", prompt=[5], max_tokens=-1)
    after = values(server)
    counts = {name: after[name] - before.get(name, 0) for name in after}
    assert (counts["prompt_tokens_total"], counts["generation_tokens_total"]) == (23 + 20 + 1, 24 + 1 + 1)
    reasons = ("length", "stop", "abort", "error")
    assert [counts[f"request_success_total {reason}"] for reason in reasons] == [5, 1, 0, 0]
    assert counts["request_prompt_tokens_count"] == 4 and counts["request_generation_tokens_count"] == 6
    assert (counts["request_params_n_count"], counts["request_params_n_sum"]) == (4, 2 + 2 + 1 + 1)
    assert counts["request_max_num_generation_tokens_sum"] == 6 + 6 + 1 + 1
    assert (counts["request_params_max_tokens_count"], counts["request_params_max_tokens_sum"]) == (4, 6 + 6 + 1 + 1)
    assert (counts["request_num_preemptions_count"], counts["request_num_preemptions_sum"]) == (6, 0)
    computed = counts["prefix_cache_queries_total"] - counts["prefix_cache_hits_total"]
    assert counts["iteration_tokens_total_count"] > 3 and counts["iteration_tokens_total_sum"] == 26 + computed
    assert counts["num_requests_waiting_by_reason capacity"] == 0
    assert counts["time_to_first_token_seconds_count"] == counts["e2e_request_latency_seconds_count"] == 6
    assert counts["request_time_per_output_token_seconds_count"] == 4
    assert 0 < counts["time_to_first_token_seconds_sum"] <= counts["e2e_request_latency_seconds_sum"]
    assert counts["prefix_cache_queries_total"] == 2 * 3 + 2 * 20 + 20 + 1 and counts["prefix_cache_hits_total"] > 16
    drafts, accepted = counts["spec_decode_num_draft_tokens_total"], counts["spec_decode_num_accepted_tokens_total"]
    assert drafts > accepted >= 0 and counts["spec_decode_num_drafts_total"] > 0
    by_position = [counts[f"spec_decode_num_accepted_tokens_per_pos_total {position}"] for position in (0, 1)]
    assert sum(by_position) == accepted
    names = ("queue", "prefill", "decode", "inference")
    times = {name: counts[f"request_{name}_time_seconds_sum"] for name in names}
    assert [counts[f"request_{name}_time_seconds_count"] for name in names] == [6] * 4
    assert min(times.values()) >= 0 and times["prefill"] > 0 and times["decode"] > 0
    assert times["queue"] + times["prefill"] == pytest.approx(counts["time_to_first_token_seconds_sum"])
    assert times["queue"] + times["inference"] == pytest.approx(counts["e2e_request_latency_seconds_sum"])
    assert counts["inter_token_latency_seconds_count"] == 0  # only streams count
    server.post("/v1/completions", json={"prompt": [9] * 20, "max_tokens": 8, "stream": True, **given})
    assert values(server)["inter_token_latency_seconds_count"] in range(5, 8)  # the first step may bring three
    assert counts["num_preemptions_total"] == 0 and after["process_resident_memory_bytes"] > 0


def test_rows_of_spilled_pages(serve: Any, tiny_llm: Callable[..., LLM]) -> None:
    """What the first rank's steps have read of them: as of the step after the question before."""
    options = {"hf_overrides": {"index_topk": 16}, "page_size": 4, "max_num_seqs": 2, "enable_prefix_caching": True}
    llm = tiny_llm(178, max_model_len=256, host_cache_memory="4MiB", hot_rows=32, **options)
    server, log = serve(llm, served_model_name=["tiny"]), StatsLog(llm.engine)
    given = {"ignore_eos": True, "temperature": 0.0, "max_tokens": 20}
    assert values(server)["hot_rows_queries_total"] == 0
    server.complete([[5, *range(3, 103)], [6, *range(3, 103)]], **given)
    values(server)
    server.complete([[7, *range(3, 103)]], **given)
    counts, config = values(server), llm.engine.config
    queries, misses = counts["hot_rows_queries_total"], counts["hot_rows_queries_total"] - counts["hot_rows_hits_total"]
    assert counts["num_spills_total"] > 0 == counts["spilled_pages"] and queries > misses > 0
    assert llm.engine.cache.hot is not None
    selecting = config.indexer_types[: config.num_hidden_layers]
    row = llm.engine.cache.format.latent.row_bytes * len(selecting) / selecting.count("full")
    assert counts["hot_rows_fetched_bytes_total"] == misses * row, "each selecting layer has as many that share it"
    rate, line = f"hot rows hit rate {1 - misses / queries:.2%}", log.line()
    assert line is not None and f"; 0 spilled pages held, {rate}, " in line and line.endswith("KiB fetched")


@pytest.mark.parametrize("dcp", [1, 2])
def test_blocks_are_pages_of_all_ranks(dcp: int) -> None:
    """Of which requests hold the fraction that is shown: a prompt's on each rank of its group, or once in the group."""
    capacity = Capacity(world_size=4, cp_size=2, pages=6, page_size=8, dcp_size=dcp)
    scheduler = Scheduler(capacity, rank=0, max_num_seqs=4, max_num_batched_tokens=64, max_prefill_share=1.0)
    scheduler.add(Request(0, [5] * 30, SamplingParams(max_tokens=4)))
    scheduler.schedule()
    facts: Any = SimpleNamespace(limits=SimpleNamespace(capacity=capacity), cache={})
    settings = next(iter(_StateCollector(facts, "tiny").collect())).samples[0].labels
    assert int(settings["num_gpu_blocks"]) * int(settings["block_size"]) == 4 * 6 * 8
    assert round(int(settings["num_gpu_blocks"]) * scheduler.cache_usage) == 4 * 2 // dcp


def test_the_dashboard_shows_what_there_is(serve: Any, drafting: LLM) -> None:
    """docs/serving/grafana.json: a dashboard as Grafana imports it, of metrics that /metrics has."""
    dashboard = json.loads((Path(__file__).parents[2] / "docs/serving/grafana.json").read_text(encoding="utf-8"))
    expressions = [dashboard["templating"]["list"][1]["query"]]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    server = serve(drafting, served_model_name=["tiny"])
    server.complete([5, 6, 7], max_tokens=4)
    there = set(re.findall(r"^(vllm:\w+)", server.get("/metrics").text, re.M))
    asked = {name for expression in expressions for name in re.findall(r"vllm:\w+", expression)}
    assert len(asked) > 10 and asked <= there
    (settings,) = re.findall(r"^vllm:cache_config_info\{(.*)\} 1.0$", server.get("/metrics").text, re.M)
    assert (
        f'block_size="{drafting.engine.scheduler.capacity.page_size}"' in settings and 'model_name="tiny"' in settings
    )
