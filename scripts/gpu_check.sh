#!/usr/bin/env bash
# Proves and measures the kernels on a CUDA device, within 8 minutes: their tests on the device, then every kernel at
# production sizes. Results go to the folder given (default: benchmarks/results).
#
#   scripts/gpu_check.sh [FOLDER]        PYTHON names the interpreter (default: .venv/bin/python, else python3)
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
out=$(realpath -m "${1:-benchmarks/results}")
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

# Compiling takes most of the time, and needs no GPU: on as many processes as there are cores, where pytest-xdist is.
processes=$("$python" -c 'import os, importlib.util as u; print(f"-n{min(16, os.cpu_count())}" if u.find_spec("xdist") else "")')
# Not -m pytest: that would put the working folder on sys.path.
pytest='import sys, pytest; sys.path.pop(0); sys.exit(pytest.main(sys.argv[1:]))'
timeout 240 "$python" -c "$pytest" tests/kernels tests/test_decode_graphs.py -q --maxfail=20 -o minversion=8 $processes 2>&1 |
	tee "$out/gpu_check_tests.log"
tests=${PIPESTATUS[0]}
timeout 230 "$python" scripts/bench_kernels.py --time-limit 200 --json "$out/kernels.json"
bench=$?
echo "tests exited with $tests, benchmark with $bench"
[ "$tests" -eq 0 ] && [ "$bench" -eq 0 ]
