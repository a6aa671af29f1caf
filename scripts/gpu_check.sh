#!/usr/bin/env bash
# Tests and measures on a CUDA device, within half an hour. The most important parts come first, every part has a time
# limit, a part that fails does not end the others, and each writes a file to the folder
# (default: benchmarks/results).
#
#   scripts/gpu_check.sh all [FOLDER]        doctor, kernels timed, latency timed, then all tests; within 26 minutes
#   scripts/gpu_check.sh kernels [FOLDER]    doctor, the kernels' tests, every kernel timed; within 10 minutes
#   scripts/gpu_check.sh latency [FOLDER]    doctor, the tests of graphs and launching ahead, then TTFT and TPOT of 4 layers
#                                            of DeepSeek-V3.2-Exp as one rank of 64, and what each overlap gains; within 10 minutes
#   scripts/gpu_check.sh ranks [FOLDER]      on 2 GPUs or more, a rank each: doctor, graphs, micro-batches with 8 and 32
#                                            hardware queues, two machines played on this one, and prefill apart from
#                                            decode last, as it hangs if anything does; within 12 minutes
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
what=${1:-}
case $what in
all | kernels | latency | ranks) ;;
*)
	echo "usage: scripts/gpu_check.sh all|kernels|latency|ranks [FOLDER], not '$what'" >&2
	exit 2
	;;
esac
out=$(realpath -m "${2:-benchmarks/results}")
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

# Importable without an installation, and without putting this folder (a top-level `kernels`) on sys.path.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$root/dsa_engine" "$site/dsa_engine"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
trap '' HUP # a connection that is lost ends nothing

lacking() {
	echo "gpu_check.sh needs $1." >&2
	echo "Without a GPU: make test, and scripts/kernel_bench/inspect_kernels.py, which compiles the kernels." >&2
	exit 1
}
# First without torch, whose import takes seconds: device files of NVIDIA's driver, of WSL, of Jetson.
"$python" -c 'import glob, sys; sys.exit(not any(map(glob.glob, ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvhost*", "/dev/nvgpu*"))))' ||
	lacking "a CUDA device; this machine has none (no /dev/nvidia0)"
capability=$(timeout 120 "$python" -c 'import sys, torch
if not torch.cuda.is_available(): sys.exit(1)
print(torch.cuda.get_device_name(), torch.__version__, file=sys.stderr)
print("{}{}".format(*torch.cuda.get_device_capability()))') ||
	lacking "a CUDA device and a CUDA build of torch; '$python' finds none"
# Triton compiles a launcher in C for each kernel.
cc=${CC:-$(command -v gcc clang cc | head -1)}
"$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' &&
	[ -n "$cc" ] || lacking "a C compiler and Python.h for Triton (packages gcc and python3-dev)"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
[ "$what" != ranks ] || [ "$gpus" -ge 2 ] || lacking "2 GPUs or more for 'ranks'; this machine has $gpus"
mkdir -p "$out" || exit 2

failed=()

# part SECONDS NAME COMMAND…: runs it, shows and keeps what it prints (NAME.log), and goes on whatever comes of it. A part
# that does not end by itself is interrupted, so that it can still clean up, and killed 45 seconds later: torchrun gives its
# ranks 30.
part() {
	local limit=$1 name=$2 begun=$SECONDS
	shift 2
	echo "== $name (at most $limit s)"
	timeout --signal=INT --kill-after=45 "$limit" "$@" 2>&1 | tee "$out/$name.log"
	local status=${PIPESTATUS[0]}
	echo "== $name: exit status $status after $((SECONDS - begun)) s"
	[ "$status" -eq 0 ] || failed+=("$name")
}

# Not -m: that would put the working folder on sys.path.
module='import runpy, sys; sys.path.pop(0); sys.argv.pop(0); runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
# Compiling takes most of the time, and needs no GPU: on as many processes as there are cores, where pytest-xdist is. There
# a test that hangs, or leaves the GPU in an error (tests/conftest.py), ends its process alone, and another one goes on.
processes=$("$python" -c 'import os, importlib.util as u
hung = "-o faulthandler_timeout=100 -o faulthandler_exit_on_timeout=true"
print(f"-n{min(16, os.cpu_count())} {hung}" if u.find_spec("xdist") else "")')

# tests SECONDS NAME TEST…
tests() {
	local limit=$1 name=$2
	shift 2
	part "$limit" "$name" "$python" -c "$module" pytest "$@" -v -o minversion=8 --junit-xml="$out/$name.xml" $processes
}

compile() { # all cores, no GPU: what the parts after it would compile one after another
	local names=(sparse_prefill indexer_prefill top_k sparse_decode indexer_decode dense_decode experts linear routing norms prologs quantise)
	part 60 compile xargs -n1 -P"$(getconf _NPROCESSORS_ONLN)" "$python" scripts/kernel_bench/inspect_kernels.py --target "$capability" --only < <(printf '%s\n' "${names[@]}")
}

doctor() { # SECONDS: whether this machine runs the engine at all
	part "$1" doctor "$python" -c "$module" dsa_engine doctor --json "$out/doctor.json"
}

kernels() {
	part 280 kernels "$python" scripts/kernel_bench/bench_kernels.py --time-limit 240 --json "$out/kernels.json"
}

one_rank=(--model deepseek_v32 --load-format dummy --emulate-world 64 --tp-size 8 --input-len 8192,32768,131072
	--hf-overrides '{"num_hidden_layers": 4, "first_k_dense_replace": 1}')
latency() {
	part 180 ttft_rank_of_64 "$python" scripts/measure_ttft.py "${one_rank[@]}" --output-len 1 \
		--json "$out/ttft_rank_of_64.json"
	part 160 tpot_rank_of_64 "$python" scripts/measure_tpot.py "${one_rank[@]}" --batch-size 64 --fill-cache random \
		--json "$out/tpot_rank_of_64.json"
}

# On all GPUs: `run` takes a program, `layers` the arguments of four layers.
layers=("${one_rank[@]:0:4}" --hf-overrides '{"num_hidden_layers": 4, "first_k_dense_replace": 1}' --output-len 8 --repeat 2)
run=("$python" -m torch.distributed.run --no-python --standalone --nproc-per-node "$gpus" "$python")
machines() { # COMMAND…: half of the GPUs each for two machines with host names of their own
	local half=$((gpus / 2)) node jobs=() ended=0 all
	unshare --user --map-root-user --uts true || { echo "two machines on one need user namespaces (unshare)"; return 1; }
	IFS=, read -ra all <<<"${CUDA_VISIBLE_DEVICES:-$(seq -s, 0 $((gpus - 1)))}"
	trap 'kill "${jobs[@]}"' INT
	for node in 0 1; do
		CUDA_VISIBLE_DEVICES=$(IFS=, && echo "${all[*]:node * half:half}") NCCL_HOSTID=machine$node \
			unshare --user --map-root-user --uts sh -c 'hostname "$NCCL_HOSTID" && exec "$@"' sh \
			"$python" -m torch.distributed.run --no-python --nnodes 2 --node-rank $node --nproc-per-node $half \
			--master-addr 127.0.0.1 --master-port 29511 "$python" "$@" &
		jobs+=($!)
	done
	for node in "${jobs[@]}"; do wait "$node" || ended=$?; done
	return $ended
}
export -f machines
ranks() {
	local queues
	part 150 doctor_ranks "${run[@]}" -c "$module" dsa_engine doctor --json "$out/doctor_ranks.json"
	part 120 graphs_ranks "${run[@]}" scripts/measure_tpot.py "${layers[@]}" --input-len 32768 --batch-size "$gpus" \
		--fill-cache random --json "$out/graphs_ranks.json"
	for queues in 8 32; do
		CUDA_DEVICE_MAX_CONNECTIONS=$queues part 90 "dbo_${queues}_queues" "${run[@]}" scripts/measure_ttft.py \
			"${layers[@]}" --enable-dbo --input-len 8192,32768 --json "$out/dbo_${queues}_queues.json"
	done
	part 90 no_dbo "${run[@]}" scripts/measure_ttft.py "${layers[@]}" --no-enable-dbo --input-len 8192,32768 \
		--json "$out/no_dbo.json"
	gpus=$gpus python=$python part 90 two_machines bash -c 'machines "$@"' bash scripts/measure_ttft.py "${layers[@]}" \
		--input-len 8192 --json "$out/two_machines.json"
	part 60 apart "${run[@]}" scripts/measure_ttft.py "${layers[@]}" --prefill-ranks $((gpus / 2)) \
		--input-len $((gpus * 8192)) --max-num-batched-tokens 8192 --timeout 40 --json "$out/apart.json" # two steps a prompt
}

graphs=(tests/engine/steps/test_{decode_graphs,steps}.py tests/engine/speculation/test_padded_drafts.py)
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
