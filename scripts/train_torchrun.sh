#!/usr/bin/env bash
# Starts `megatron_ppo train` on this node's ranks; the same command on every node of a launch of several.
#
#   bash scripts/train_torchrun.sh --config run.yaml --run-dir runs/mine [any flag of train]
#
# PYTHON (default: the active environment's, else .venv of this repository)
# NPROC_PER_NODE (default: GPUs here, or 4)   NNODES (1)   RDZV_ENDPOINT (HOST:PORT; required where NNODES is above 1)
# MAX_RESTARTS (2): a lost rank ends all; torchrun starts them again, and they go on from the newest checkpoint of the run folder.
# SHUTDOWN_TIMEOUT (1800): seconds between a SIGTERM and SIGKILL; more than an iteration and a save take.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a restart must not read the addresses of dead ranks
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
. "$(dirname "${BASH_SOURCE[0]}")/interpreter.sh"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c . || true); fi
nodes=${NNODES:-1}
if [ "$nodes" = 1 ]; then
    rendezvous=(--standalone)
else
    [ -n "${RDZV_ENDPOINT:-}" ] || { echo "train_torchrun: set RDZV_ENDPOINT to HOST:PORT of one node, the same on all" >&2; exit 2; }
    rendezvous=(--nnodes "$nodes" --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-megatron_ppo}")
fi
[ "$gpus" -gt 0 ] || gpus=4
exec "$python" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node "${NPROC_PER_NODE:-$gpus}" --max-restarts "${MAX_RESTARTS:-2}" \
    --shutdown-timeout "${SHUTDOWN_TIMEOUT:-1800}" -m megatron_ppo train "$@"
