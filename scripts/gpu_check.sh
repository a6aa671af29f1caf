#!/usr/bin/env bash
# Tests and measures on a CUDA device, within half an hour. The most important parts come first, every part has a time
# limit, a part that fails does not end the others, and each writes a file to the folder
# (default: benchmarks/results).
#
#   scripts/gpu_check.sh all [FOLDER]        doctor, kernels timed, latency timed, then all tests; within 26 minutes
#   scripts/gpu_check.sh kernels [FOLDER]    doctor, the kernels' tests, every kernel timed; within 10 minutes
#   scripts/gpu_check.sh latency [FOLDER]    doctor, the tests of graphs and launching ahead, then TTFT and TPOT of 4 layers
#                                            of DeepSeek-V3.2-Exp as one rank of 64, and what each overlap gains; within 10 minutes
#   scripts/gpu_check.sh ranks [FOLDER]      several ranks, which compute what one computes: one on each GPU, or four on
#                                            one, with two machines played on this one. On 2 GPUs or more also doctor, graphs,
#                                            TTFT with micro-batches and without, and prefill apart from decode last, as it
#                                            hangs if anything does; within 12 minutes
#
# Less time: scripts/gpu_15.sh.
. "$(dirname "$0")/gpu_parts.sh"
what=${1:-}
[[ $what =~ ^(all|kernels|latency|ranks)$ ]] || { echo "usage: scripts/gpu_check.sh all|kernels|latency|ranks [FOLDER], not '$what'" >&2; exit 2; }
out=$(realpath -m "${2:-benchmarks/results}")
find_gpus
mkdir -p "$out" || exit 2

doctor() { # SECONDS: whether this machine runs the engine at all
	part "$1" doctor "$python" -c "$module" dsa_engine doctor --json "$out/doctor.json"
}

kernels() {
	part 280 kernels "$python" scripts/kernel_bench/bench_kernels.py --time-limit 240 --json "$out/kernels.json"
}

deep 4
lengths=(--input-len 8192,32768,131072)
latency() {
	part 180 ttft_rank_of_64 "$python" scripts/measure_ttft.py "${rank_of_64[@]}" "${depth[@]}" "${lengths[@]}" \
		--output-len 1 --json "$out/ttft_rank_of_64.json"
	part 160 tpot_rank_of_64 "$python" scripts/measure_tpot.py "${rank_of_64[@]}" "${depth[@]}" "${lengths[@]}" \
		--batch-size 64 --fill-cache random --json "$out/tpot_rank_of_64.json"
}

layers=("${rank_of_64[@]:0:4}" "${depth[@]}" --output-len 8 --repeat 2)
ranks() {
	local dbo
	part 60 one_process "$python" scripts/check_ranks.py "$out/one_process.json"
	part 110 compare bash -c 'compare_ranks "$@"' bash "$out/one_process.json"
	((gpus > 1)) || return # what follows takes the memory of a GPU for each rank
	part 130 doctor_ranks bash -c 'together "$@"' bash 1 -c "$module" dsa_engine doctor --json "$out/doctor_ranks.json"
	part 100 graphs_ranks bash -c 'together "$@"' bash 1 scripts/measure_tpot.py "${layers[@]}" --input-len 32768 \
		--batch-size "$ranks" --fill-cache random --json "$out/graphs_ranks.json"
	for dbo in enable-dbo no-enable-dbo; do
		part 80 $dbo bash -c 'together "$@"' bash 1 scripts/measure_ttft.py "${layers[@]}" --$dbo \
			--input-len 8192,32768 --json "$out/$dbo.json"
	done
	part 80 two_machines bash -c 'together "$@"' bash 2 scripts/measure_ttft.py "${layers[@]}" --input-len 8192 \
		--json "$out/two_machines.json"
	part 60 apart bash -c 'together "$@"' bash 1 scripts/measure_ttft.py "${layers[@]}" --prefill-ranks $((ranks / 2)) \
		--input-len $((ranks * 8192)) --max-num-batched-tokens 8192 --timeout 40 --json "$out/apart.json" # two steps a prompt
}

case $what in
all)
	compile
	doctor 150
	kernels
	latency
	tests 120 tests_graphs "${graphs[@]}"
	tests 300 tests_kernels tests/kernels
	;;
kernels)
	compile
	doctor 100
	tests 110 tests_kernels tests/kernels
	kernels
	;;
latency)
	compile
	doctor 100
	tests 70 tests_graphs "${graphs[@]}"
	latency
	;;
ranks) ranks ;;
esac
[ ${#failed[@]} -eq 0 ] || echo "FAILED: ${failed[*]} (what they printed: $out/NAME.log)"
exit $((${#failed[@]} > 0))
