#!/bin/sh
# Starts a command of dsa-engine on one machine of several, with 8 ranks. Run it on every machine, with the same words:
#   MACHINES=2 FIRST_HOST=node1 sh start.sh -m dsa_engine serve /srv/DeepSeek-V3.2 --tp-size 8 --kv-cache-dtype fp8 --host 0.0.0.0
set -eu
: "${MACHINES:?number of machines}" "${FIRST_HOST:?host name of the machine that the others meet at}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
# Both name the network of the control messages; without them the address of the host name is taken.
if [ -n "${NETWORK:-}" ]; then
    export GLOO_SOCKET_IFNAME="$NETWORK" NCCL_SOCKET_IFNAME="$NETWORK"
fi
# Compiled kernels: on a local disk of each machine.
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-/tmp/dsa-engine/triton}" DSA_ENGINE_CACHE="${DSA_ENGINE_CACHE:-/tmp/dsa-engine}"
exec torchrun --nnodes "$MACHINES" --nproc-per-node "${RANKS:-8}" --rdzv-backend c10d --rdzv-id "${RUN:-dsa-engine}" \
    --rdzv-endpoint "$FIRST_HOST:${PORT:-29500}" "$@"
