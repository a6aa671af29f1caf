#!/usr/bin/env bash
# Tests and measures on a CUDA device, within half an hour. The most important parts come first, every part has a time
# limit, a part that fails does not end the others, and each writes a file to the folder
# (default: benchmarks/results).
#
#   scripts/gpu_check.sh all [FOLDER]        doctor, kernels timed, latency timed, then all tests; within 26 minutes
#   scripts/gpu_check.sh kernels [FOLDER]    doctor, the kernels' tests, every kernel timed; within 10 minutes
#   scripts/gpu_check.sh latency [FOLDER]    doctor, the tests of graphs and launching ahead, then TTFT and TPOT of 4 layers
#                                            of DeepSeek-V3.2-Exp as one rank of 64, and what each overlap gains; within 10 minutes
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
what=${1:-}
case $what in
all | kernels | latency) ;;
*)
	echo "usage: scripts/gpu_check.sh all|kernels|latency [FOLDER], not '$what'" >&2
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
timeout 120 "$python" -c 'import sys, torch
if not torch.cuda.is_available(): sys.exit(1)
print(torch.cuda.get_device_name(), torch.__version__)' ||
	lacking "a CUDA device and a CUDA build of torch; '$python' finds none"
mkdir -p "$out" || exit 2

failed=()

# part SECONDS NAME COMMAND…: runs it, shows and keeps what it prints (NAME.log), and goes on whatever comes of it. A part
# that does not end by itself is interrupted, so that it can still clean up, and killed 20 seconds later.
part() {
	local limit=$1 name=$2 begun=$SECONDS
	shift 2
	echo "== $name (at most $limit s)"
	timeout --signal=INT --kill-after=20 "$limit" "$@" 2>&1 | tee "$out/$name.log"
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

doctor() { # SECONDS: whether this machine runs the engine at all; it compiles the kernels that the others use
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
	part 200 overlaps_rank_of_64 "$python" scripts/compare_overlaps.py "${one_rank[@]}" --batch-size 64 \
		--json "$out/overlaps_rank_of_64.json"
	part 30 page_tiers "$python" scripts/bench_page_tiers.py --model deepseek_v32 --kv-cache-dtype fp8 --pages 256 \
		--json "$out/page_tiers.json"
}

graphs=(tests/engine/steps/test_{decode_graphs,steps}.py tests/engine/speculation/test_padded_drafts.py)
case $what in
all)
	doctor 150
	kernels
	latency
	tests 240 tests_graphs "${graphs[@]}"
	tests 480 tests_kernels tests/kernels
	;;
kernels)
	doctor 90
	tests 210 tests_kernels tests/kernels
	kernels
	;;
latency)
	doctor 90
	tests 100 tests_graphs "${graphs[@]}"
	latency
	;;
esac
[ ${#failed[@]} -eq 0 ] || echo "FAILED: ${failed[*]} (what they printed: $out/NAME.log)"
exit $((${#failed[@]} > 0))
