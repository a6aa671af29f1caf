#!/bin/sh
# Starts a command of dsa-engine on one machine of several, with 8 ranks. Run it on every machine, each with its NUMBER:
#   MACHINES=2 NUMBER=0 FIRST_HOST=node1 sh start.sh -m dsa_engine serve /srv/DeepSeek-V3.2 --tp-size 8 --kv-cache-dtype fp8 --host 0.0.0.0
set -eu
: "${MACHINES:?number of machines}" "${FIRST_HOST:?host name of machine 0, which the others meet at}"
: "${NUMBER:?number of this machine, from 0: its ranks follow those of the machines before it}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# Both name the network of the control messages; without them the address of the host name is taken.
if [ -n "${NETWORK:-}" ]; then
    export GLOO_SOCKET_IFNAME="$NETWORK" NCCL_SOCKET_IFNAME="$NETWORK"
fi
# Compiled kernels: on a local disk of each machine.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/dsa-engine/triton}" DSA_ENGINE_CACHE="${DSA_ENGINE_CACHE:-/tmp/dsa-engine}"
exec torchrun --nnodes "$MACHINES" --nproc-per-node "${RANKS:-8}" --node-rank "$NUMBER" \
    --master-addr "$FIRST_HOST" --master-port "${PORT:-29500}" "$@"
