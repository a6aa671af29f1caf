"""Tables of a measured prefill."""

from __future__ import annotations

from dsa_engine.commands.bench.prefill_benchmark import PrefillResult
from dsa_engine.measure.emulation.handover import handover_line
from dsa_engine.measure.report import format_table
from dsa_engine.measure.stage_timer import mean_stages
from dsa_engine.system.sizes import format_bytes


def print_prefill(result: PrefillResult, this_rank: int) -> None:
    """Prints TTFT and rate of one length, then a table of the ranks and one of the stages."""
    j, ttft = result.to_json(), result.ttft
    runs = f"min {min(result.seconds) * 1e3:.0f}, max {max(result.seconds) * 1e3:.0f}, {len(result.seconds)} runs"
    if result.communication is None:
        times = f"TTFT {j['median_ttft_ms']:.0f} ms ({runs}), {j['input_throughput']:.0f} tokens/s"
        times += f", {j['input_throughput_per_device']:.0f} per device"
    else:
        times = (
            f"computed {ttft.median * 1e3:.1f} ms ({runs}; measured), communication "
            f"{result.communication.seconds * 1e3:.1f} ms (modelled); TTFT {ttft.not_overlapped * 1e3:.1f} ms not "
            f"overlapped, {ttft.overlapped * 1e3:.1f} ms overlapped"
        )
    print(f"\n{result.input_len} tokens: {times}, attention imbalance {result.imbalance:.4f} (max/mean)\n")
    ranks = zip(result.peak_memory_bytes, result.attention_pairs, result.bytes_sent, strict=True)
    one = this_rank if result.communication is not None else 0  # an emulated run has only this rank
    rows = [
        (one + i, format_bytes(peak), f"{pairs:,}", format_bytes(sent)) for i, (peak, pairs, sent) in enumerate(ranks)
    ]
    print(format_table(("rank", "peak memory", "query-key pairs (causal)", "sent"), rows))
    if result.handover is not None:
        print("\n" + handover_line(result.handover, "prefill", result.handover_bytes_sent))
    means = mean_stages(result.stage_seconds)
    total = sum(means.values())
    stages = [
        (name, mean * 1e3, max(rank[name] for rank in result.stage_seconds) * 1e3, f"{mean / total:.1%}")
        for name, mean in means.items()
        if mean
    ]
    print(f"\nStages, in one more run that was watched, which took {result.watched_seconds * 1e3:.0f} ms:\n")
    print(format_table(("stage", "mean ms", "slowest rank", "share"), stages))
