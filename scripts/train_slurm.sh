#!/usr/bin/env bash
#SBATCH --job-name=megatron_ppo
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@600
# One task a rank under srun. Ten minutes before the time limit Slurm sends SIGTERM to all ranks: they save, write PREEMPTED, and exit with 0;
# then this script asks for the job to be queued again, and the same command goes on from the checkpoint.
#
#   sbatch --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 scripts/train_slurm.sh --config run.yaml --run-dir runs/mine [any flag of train]
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

run_dir=$(python -c 'import sys
from megatron_ppo.config_io import parse_arguments
print(parse_arguments(sys.argv[1:], program="megatron_ppo train").logging.run_dir)' "$@")  # a flag, the YAML file or the default

# A rank that is lost ends all the others by itself; --kill-on-bad-exit also ends what has not come up yet.
srun --kill-on-bad-exit=1 python -m megatron_ppo train "$@"
if [ -f "$run_dir/PREEMPTED" ]; then
    echo "stopped before the time limit: queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
fi
