# What gpu_check.sh and gpu_15.sh share: the interpreter, how a part is run, and parts that both have. To be sourced.
# PYTHON names the interpreter (default: .venv/bin/python, else python3).
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
script=$(basename "$0")
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}

# Importable without an installation, and without putting this folder (a top-level `kernels`) on sys.path.
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
ln -s "$root/dsa_engine" "$site/dsa_engine"
export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
unset TRITON_INTERPRET
trap '' HUP # a connection that is lost ends nothing

lacking() {
	echo "$script needs $1." >&2
	echo "Without a GPU: make test, and scripts/kernel_bench/inspect_kernels.py, which compiles the kernels." >&2
	exit 1
}
find_gpus() { # sets gpus and capability, or ends the script
	read -r gpus capability < <(timeout 120 "$python" -c 'import sys, torch
if not torch.cuda.is_available(): sys.exit(1)
print(torch.cuda.get_device_name(), torch.__version__, torch.cuda.nccl.version(), file=sys.stderr)
print(torch.cuda.device_count(), "{}{}".format(*torch.cuda.get_device_capability()))') ||
		lacking "a CUDA device and a CUDA build of torch; '$python' finds none"
	ranks=$((gpus > 1 ? gpus : 4))
}

failed=()
deadline=999999 # seconds after the start, at which the last part ends
shown=''        # lines of a part's log to show when it has ended; '': all, at once
after_part() { :; }

# part SECONDS NAME COMMAND…: runs it, shows and keeps what it prints (NAME.log), and goes on whatever comes of it. A part
# that does not end by itself is interrupted, so that it can still clean up, and killed later: xdist takes seconds.
part() {
	local limit=$1 name=$2 begun=$SECONDS status
	shift 2
	((limit = limit < deadline - SECONDS ? limit : deadline - SECONDS))
	if ((limit < 5)); then
		echo "== $name: left out, the time is over" && failed+=("$name")
		return
	fi
	echo "== $name (at most $limit s)"
	if [ -n "$shown" ]; then
		timeout --signal=INT --kill-after=5 "$limit" "$@" >"$out/$name.log" 2>&1
		status=$?
		grep -hE -- "$shown" "$out/$name.log" | cut -c1-250 | tail -n 14
		[ "$status" -eq 0 ] || tail -n 4 "$out/$name.log" | cut -c1-250
	else
		timeout --signal=INT --kill-after=45 "$limit" "$@" 2>&1 | tee "$out/$name.log"
		status=${PIPESTATUS[0]}
	fi
	echo "== $name: exit status $status after $((SECONDS - begun)) s"
	[ "$status" -eq 0 ] || failed+=("$name")
	after_part
}

# Not -m: that would put the working folder on sys.path.
module='import runpy, sys; sys.path.pop(0); sys.argv.pop(0); runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)'
# Compiling takes most of the time, and needs no GPU: on as many processes as there are cores, where pytest-xdist is. There
# a test that hangs, or leaves the GPU in an error (tests/conftest.py), ends its process alone, and another one goes on.
tests() { # SECONDS NAME TEST…
	local limit=$1 name=$2 processes
	shift 2
	processes=$("$python" -c 'import os, importlib.util as u
hung = "-o faulthandler_timeout=60 -o faulthandler_exit_on_timeout=true"
print(f"-n{min(14, os.cpu_count())} {hung}" if u.find_spec("xdist") else "")')
	part "$limit" "$name" "$python" -c "$module" pytest "$@" -v -o minversion=8 --junit-xml="$out/$name.xml" $processes
}
graphs=(tests/engine/steps/test_{decode_graphs,steps}.py tests/engine/speculation/test_padded_drafts.py)

compiled=(sparse_prefill indexer_prefill top_k sparse_decode indexer_decode dense_decode experts linear routing norms prologs quantise)
compile() { # on all cores, without a GPU: what the parts after it would compile one after another
	part 60 compile xargs -n1 -P"$(getconf _NPROCESSORS_ONLN)" "$python" scripts/kernel_bench/inspect_kernels.py --target "$capability" --only < <(printf '%s\n' "${compiled[@]}")
}

rank_of_64=(--model deepseek_v32 --load-format dummy --emulate-world 64 --tp-size 8)
deep() { # LAYERS: options for so many layers
	depth=(--hf-overrides "{\"num_hidden_layers\": $1, \"first_k_dense_replace\": 1}")
}

# together HOSTS COMMAND…: one process each for $ranks ranks of a run, on 1 or 2 machines, which host names make of this
# one. To NCCL each rank is a machine where they share a GPU. When one fails, the others are soon ended.
together() {
	local hosts=$1 rank jobs=() ended=0 port=$((29500 + RANDOM % 400)) space=() nccl=()
	shift
	[ "$UID" = 0 ] && space=(unshare --uts) || space=(unshare --user --map-root-user --uts)
	"${space[@]}" true || { echo "host names of their own need namespaces (unshare): all are on one" && hosts=1; }
	for ((rank = 0; rank < ranks; rank++)); do
		[ "$hosts" = 1 ] || nccl=(NCCL_HOSTID=machine$((rank * hosts / ranks)))
		((ranks <= gpus)) || nccl=(NCCL_HOSTID=rank$rank NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1 GLOO_SOCKET_IFNAME=lo)
		local run=(env "${nccl[@]}" RANK=$rank WORLD_SIZE=$ranks LOCAL_RANK=$((gpus ? rank % gpus : 0))
			LOCAL_WORLD_SIZE=$((ranks / hosts)) MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$python" "$@")
		if [ "$hosts" = 1 ]; then
			"${run[@]}" &
		else
			"${space[@]}" sh -c 'hostname "$0" && exec "$@"' "machine$((rank * hosts / ranks))" "${run[@]}" &
		fi
		jobs+=($!)
	done
	while ((ended == 0)); do
		wait -n
		ended=$?
	done
	if ((ended != 127)); then # which says that all have ended
		sleep 3               # so that the others can say what they saw
		kill -KILL "${jobs[@]}" 2>/dev/null
	fi
	ended=0
	for rank in "${jobs[@]}"; do wait "$rank" || ended=$?; done
	return $ended
}

compare_ranks() { # FILE: the cases of check_ranks.py; after one that fails, the next ones in new processes
	local cases=(apart graphs rebalancing preemption prefix by_node micro_batches drafts batch_invariant) log begun now ended=0
	log=$(mktemp)
	while ((${#cases[@]})); do
		now=("${cases[@]}")
		[ "${now[0]}" != apart ] || now=(apart) # two parts order their launches in another way, which NCCL reads once
		together 2 scripts/check_ranks.py "$1" "${now[@]}" --device "$device" 2>&1 | tee "$log"
		[ "${PIPESTATUS[0]}" -eq 0 ] && begun=${#now[@]} || { ended=1 && begun=$(grep -c '^case ' "$log"); }
		((begun)) || break
		cases=("${cases[@]:begun}")
	done
	rm "$log"
	return $ended
}
export -f together compare_ranks
device=cuda
export python gpus ranks device # which have values later
