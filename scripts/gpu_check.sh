#!/usr/bin/env bash
# Proves and measures on a CUDA device, each within 10 minutes, after `dsa-engine doctor`. Results go to the folder given (default:
# benchmarks/results).
#
#   scripts/gpu_check.sh kernels [FOLDER]    the kernels' tests on the device, then every kernel at production sizes
#   scripts/gpu_check.sh latency [FOLDER]    CUDA graphs and launching ahead give the same tokens; then TTFT and TPOT of
#                                            4 layers of DeepSeek-V3.2-Exp as one rank of 64, and what each overlap gains
#
# PYTHON names the interpreter (default: .venv/bin/python, else python3).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
what=${1:-}
case $what in
kernels | latency) ;;
*)
	echo "usage: scripts/gpu_check.sh kernels|latency [FOLDER], not '$what'" >&2
	exit 2
	;;
esac
out=$(realpath -m "${2:-benchmarks/results}")
mkdir -p "$out"
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

# Importable without an installation, and without putting this folder (a top-level `kernels`) on sys.path.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$root/dsa_engine" "$site/dsa_engine"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET

"$python" -c 'import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name(), torch.__version__)' || {
	echo "gpu_check.sh needs a CUDA device and a CUDA build of torch; '$python' has none." >&2
	echo "Without a GPU: make test, and scripts/inspect_kernels.py, which compiles the kernels." >&2
	exit 1
}

# Whether this machine runs the engine at all; what it finds does not end the rest.
timeout 120 "$python" -c 'import sys; sys.path.pop(0); from dsa_engine.cli import main; main(sys.argv[1:])' \
	doctor --json "$out/doctor.json" || echo "FAILED: doctor (its findings stand above)"

# Compiling takes most of the time, and needs no GPU: on as many processes as there are cores, where pytest-xdist is.
processes=$("$python" -c 'import os, importlib.util as u; print(f"-n{min(16, os.cpu_count())}" if u.find_spec("xdist") else "")')
failed=0

# run_tests SECONDS TEST…; not -m pytest: that would put the working folder on sys.path.
run_tests() {
	local limit=$1
	shift
	timeout "$limit" "$python" -c 'import sys, pytest; sys.path.pop(0); sys.exit(pytest.main(sys.argv[1:]))' \
		"$@" -q --maxfail=20 -o minversion=8 $processes 2>&1 | tee "$out/gpu_check_$what.log"
	[ "${PIPESTATUS[0]}" -eq 0 ] || { failed=1 && echo "FAILED: tests"; }
}

# measure SECONDS SCRIPT ARGUMENT…
measure() {
	local limit=$1 script=$2
	shift 2
	timeout "$limit" "$python" "scripts/$script" "$@" || { failed=1 && echo "FAILED: $script"; }
}

if [ "$what" = kernels ]; then
	run_tests 240 tests/kernels tests/engine/test_decode_graphs.py tests/engine/test_padded_drafts.py
	measure 230 bench_kernels.py --time-limit 200 --json "$out/kernels.json"
else
	run_tests 150 tests/engine/test_decode_graphs.py tests/engine/test_padded_drafts.py tests/engine/test_steps.py
	model=$site/model
	mkdir "$model"
	"$python" -c 'import json, sys; from dsa_engine.checkpoint import released_config
json.dump(released_config("deepseek_v32"), open(sys.argv[1], "w"))' "$model/config.json"
	one_rank=(--model "$model" --load-format dummy --emulate-world 64 --tp-size 8 --input-len 8192,32768,131072
		--hf-overrides '{"num_hidden_layers": 4, "first_k_dense_replace": 1}')
	measure 200 measure_ttft.py "${one_rank[@]}" --output-len 1 --json "$out/ttft_rank_of_64.json"
	measure 230 compare_overlaps.py "${one_rank[@]}" --batch-size 64 --json "$out/overlaps_rank_of_64.json"
fi
exit "$failed"
