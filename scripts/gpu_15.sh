#!/usr/bin/env bash
# What fifteen minutes on one GPU can answer, in two calls, the most important first. They may be cut off anywhere: FOLDER has
# the traces, and results.tar.gz and summary.txt after each part.
#
#   scripts/gpu_15.sh first FOLDER     within 475 s: kernels beside their alternatives and variants, TPOT (3 and 0 drafts) and
#                                      TTFT of 4 layers of DeepSeek-V3.2-Exp as one rank of 64, tests, four ranks on the GPU
#   scripts/gpu_15.sh second FOLDER    within 175 s, on the same machine: which launch failed, if TPOT did; TPOT and TTFT of 8
#                                      layers, scores in Gluon, then what failed before
#
# GPU_DEVICE=cpu tries all of it at small sizes.
. "$(dirname "$0")/gpu_parts.sh"
[[ "${1:-}" =~ ^(first|second)$ && -n "${2:-}" ]] || { echo "usage: scripts/gpu_15.sh first|second FOLDER, not '$*'" >&2; exit 2; }
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} TOKENIZERS_PARALLELISM=false # many processes at once
folder=$(realpath -m "$2")
out=${TMPDIR:-/tmp}/gpu_15
device=${GPU_DEVICE:-cuda}
layers=(4 8)
lengths=(8192,131072 131072)
batch=64
one_rank=("${rank_of_64[@]}" --optimize latency --moe-dispatch by_node --cache-memory 30GiB) # by name: no size is tried out
kernel_tests=(tests/kernels "${graphs[@]}")
kernels=()
compiling=''
if [ "$device" = cpu ]; then
	gpus=0 capability=90 ranks=4 layers=(2 3) lengths=(64,128 128) batch=4 kernels=(--device cpu --small) kernel_tests=("${graphs[1]}")
	one_rank=(--model demo-random --load-format dummy --emulate-world 4 --tp-size 2 --device cpu)
else
	find_gpus
fi
steps=(--input-len "${lengths[1]}" --batch-size $batch --max-num-seqs $batch --output-len 32 --fill-cache random)
mkdir -p "$folder" "$out" || exit 2
exec > >(tee -a "$folder/summary.txt") 2>&1
after_part() {
	local trace
	for trace in "$out"/*.trace.json; do
		[ ! -e "$trace" ] || { gzip -1c "$trace" >"$folder/$(basename "$trace").gz" && rm "$trace"; }
	done
	printf '%s\n' "${failed[@]}" >"$out/failed"
	tar czf "$folder/results.new" -C "$out" . && mv "$folder/results.new" "$folder/results.tar.gz"
}

bench() { # PART SECONDS NAMES
	local name=$1 limit=$2 names=$3
	shown='^ceilings|[0-9]%|^FAILED|^not measured' part "$limit" "$name" "$python" scripts/kernel_bench/bench_kernels.py \
		"${kernels[@]}" --only "$names" --time-limit $((limit * 7 / 10)) --json "$out/$name.json"
}
measure() { # tpot|ttft LAYERS SECONDS OPTION…
	local name=$1_$2 metric=$1 limit=$3
	deep "$2"
	shift 3
	shown='^ *[0-9,]+ .* (G|M)iB|SCALED|^(decode|prefill) stage|^host|^rank 0:|beyond the median|Error' part "$limit" "$name" \
		"$python" "scripts/measure_$metric.py" "${one_rank[@]}" "${depth[@]}" "$@" --no-progress \
		--json "$out/$name.json" --profile "$out/$name.trace.json"
}
run() { # PART; a new part: its command here, its name in `parts`, and their limits stay within 480 s and 180 s
	case $1 in
	environment) shown=. part 15 environment "$python" -c "$module" dsa_engine env ;;
	one_process) shown=Error part 70 one_process "$python" scripts/check_ranks.py "$out/one_process.json" --device "$device" ;;
	kernels)
		[ "$compiling" = '' ] || wait "$compiling"
		bench kernels 50 sparse_prefill,linear,experts,top_k,sparse_decode,indexer_prefill
		;;
	variants) bench variants 30 variant_products,variant_topk ;;
	scores) bench scores 25 variant_scores ;; # alone: a fault in Gluon may hang
	launches) # each ended before the next: the error is of the one that it names
		deep "${layers[0]}"
		CUDA_LAUNCH_BLOCKING=1 shown='kernels/.*line|Error' part 45 launches "$python" scripts/measure_tpot.py \
			"${one_rank[@]}" "${depth[@]}" "${steps[@]}" --num-speculative-tokens 3 --repeat 1 --kernels triton --no-progress
		;;
	tpot_*) measure tpot "${1#*_}" 80 "${steps[@]}" --num-speculative-tokens 3,0 --repeat 2 ;;
	ttft_*) measure ttft "${1#*_}" 50 --input-len "${lengths[0]}" --output-len 1 --enable-dbo ;;
	tests) shown='^(FAILED|ERROR)|=+ .* (passed|failed)|^FAILED' tests 75 tests "${kernel_tests[@]}" ;;
	ranks) shown='^(FAILED|[a-z_]+: [0-9.]+ s, )' part 100 ranks bash -c 'compare_ranks "$@"' bash "$out/one_process.json" ;;
	stress) [ "$device" = cpu ] || shown=. part 20 stress "$python" scripts/kernel_bench/stress_last_program.py 12 ;;
	depths) shown=. part 5 depths "$python" -c "$depths" "$out" "${layers[@]}" ;;
	esac
}
depths='import json, sys
folder, few, many = sys.argv[1], *map(int, sys.argv[2:])
for metric in ("tpot", "ttft"):
    for a, b in zip(*(json.load(open(f"{folder}/{metric}_{n}.json"))["results"] for n in (few, many))):
        less, more = (one[f"median_{metric}_ms"] for one in (a, b))
        layer = (more - less) / (many - few)
        print(metric, a["input_len"], a.get("num_speculative_tokens", 0), f"drafts: {less:.2f} and {more:.2f} ms, a layer {layer:.3f} ms, 61 layers {less + (61 - few) * layer:.1f} ms")'

if [ "$1" = first ]; then
	deadline=470
	rm -rf "${out:?}"/*
	(after_part() { :; } && shown='FAILED|[Ee]rror' && compile) &
	compiling=$!
	parts=(environment one_process kernels variants "tpot_${layers[0]}" "ttft_${layers[0]}" tests ranks)
else
	deadline=170
	parts=("tpot_${layers[1]}" "ttft_${layers[1]}" depths stress scores $(cat "$out/failed"))
	! grep -q tpot "$out/failed" || parts=(launches "${parts[@]}")
fi
for name in "${parts[@]}"; do run "$name"; done
[ ${#failed[@]} -eq 0 ] || echo "FAILED: ${failed[*]}"
exit $((${#failed[@]} > 0))
