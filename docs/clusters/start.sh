#!/bin/sh
# Starts a command of dsa-engine on one node of several, with 8 ranks. Run it on every node, each with its NUMBER:
#   NODES=2 NUMBER=0 FIRST_HOST=node1 sh start.sh -m dsa_engine serve /srv/DeepSeek-V3.2 --tp-size 8 --kv-cache-dtype fp8 --host 0.0.0.0
set -eu
: "${NODES:?number of nodes}" "${FIRST_HOST:?host name of node 0, which the others meet at}"
: "${NUMBER:?number of this machine, from 0: its ranks follow those of the nodes before it}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# Both name the network of the control messages; without them the address of the host name is taken.
if [ -n "${NETWORK:-}" ]; then
    export GLOO_SOCKET_IFNAME="$NETWORK" NCCL_SOCKET_IFNAME="$NETWORK"
fi
# Compiled kernels: on a local disk of each node.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/dsa-engine/triton}" DSA_ENGINE_CACHE="${DSA_ENGINE_CACHE:-/tmp/dsa-engine}"
exec torchrun --nnodes "$NODES" --nproc-per-node "${RANKS:-8}" --node-rank "$NUMBER" \
    --master-addr "$FIRST_HOST" --master-port "${PORT:-29500}" "$@"
