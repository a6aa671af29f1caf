"""Tables of a measured prefill."""

from __future__ import annotations

from dsa_engine.commands.bench.prefill_benchmark import PrefillResult
from dsa_engine.measure.report import format_table
from dsa_engine.measure.stage_timer import mean_stages
from dsa_engine.system.sizes import format_bytes


def print_prefill(result: PrefillResult, first_rank: int) -> None:
    """Prints TTFT and rate of one length, then a table of the ranks from ``first_rank`` on and one of the stages."""
    j = result.to_json()
    runs = f"min {min(result.seconds) * 1e3:.0f}, max {max(result.seconds) * 1e3:.0f}, {len(result.seconds)} runs"
    times = f"TTFT {j['median_ttft_ms']:.0f} ms ({runs}), {j['input_throughput']:.0f} tokens/s"
    times += f", {j['input_throughput_per_device']:.0f} per device"
    print(f"\n{result.input_len} tokens: {times}, attention imbalance {result.imbalance:.4f} (max/mean)\n")
    ranks = zip(result.peak_memory_bytes, result.attention_pairs, result.bytes_sent, strict=True)
    rows = [
        (rank, format_bytes(peak), f"{pairs:,}", format_bytes(sent))
        for rank, (peak, pairs, sent) in enumerate(ranks, first_rank)
    ]
    print(format_table(("rank", "peak memory", "query-key pairs (causal)", "sent"), rows))
    means = mean_stages(result.stage_seconds)
    total = sum(means.values())
    stages = [
        (name, mean * 1e3, max(rank[name] for rank in result.stage_seconds) * 1e3, f"{mean / total:.1%}")
        for name, mean in means.items()
        if mean
    ]
    print(f"\nStages, in one more run that was watched, which took {result.watched_seconds * 1e3:.0f} ms:\n")
    print(format_table(("stage", "mean ms", "slowest rank", "share"), stages))
