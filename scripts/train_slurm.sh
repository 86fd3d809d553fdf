#!/usr/bin/env bash
#SBATCH --job-name=megatron_ppo
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@600
# A job for sbatch. Ten minutes before the time limit Slurm sends SIGTERM to all ranks: they save, write PREEMPTED into the run folder, and end;
# then this script asks for the job to be queued again, and the same command goes on from the checkpoint.
#
#   sbatch --nodes 2 --ntasks-per-node 8 --cpus-per-task 8 --gpus-per-node 8 scripts/train_slurm.sh --config run.yaml --run-dir runs/mine [any flag of train]
#
# LAUNCHER=srun (default): one task a rank. Where the job is heterogeneous, tasks are numbered across its components in their order, so that the
#   first holds the training ranks:  sbatch PARTITION-AND-SIZES-OF-TRAINING : PARTITION-AND-SIZES-OF-ROLLOUT scripts/train_slurm.sh ...
# LAUNCHER=torchrun: one agent a node, which starts a lost launch again on the same nodes (MAX_RESTARTS, default 2). Ask for one task a node and
#   its cores:  LAUNCHER=torchrun sbatch --nodes 2 --ntasks-per-node 1 --cpus-per-task 64 --gpus-per-node 8 scripts/train_slurm.sh ...
# SCRIPTS (scripts): the folder of this file, where sbatch is not called in the root of the repository. PYTHON: as for train_torchrun.sh.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
if [ "${SLURM_HET_SIZE:-1}" != 1 ]; then  # Slurm names the cores of each component; one step has one number
    for ((component = 0; component < SLURM_HET_SIZE; component++)); do
        cores="SLURM_CPUS_PER_TASK_HET_GROUP_$component"
        if [ "${!cores:-1}" != "${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1}" ]; then
            echo "train_slurm: --cpus-per-task is ${SLURM_CPUS_PER_TASK_HET_GROUP_0:-1} and ${!cores:-1}; ask for the same in all components" >&2
            exit 2
        fi
    done
    SLURM_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK_HET_GROUP_0:-}
fi
[ -z "${SLURM_CPUS_PER_TASK:-}" ] || export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it over from sbatch (Slurm 22.05 on)

scripts=${SCRIPTS:-scripts}
if [ -f "$scripts/interpreter.sh" ]; then . "$scripts/interpreter.sh"; else python=${PYTHON:-python}; fi
run_dir=$("$python" -c 'import sys
from megatron_ppo.config_io import parse_arguments
print(parse_arguments(sys.argv[1:], program="megatron_ppo train").logging.run_dir)' "$@")  # a flag, the YAML file or the default

components=${SLURM_HET_SIZE:-1}
case "${LAUNCHER:-srun}" in
    srun)
        groups=()
        [ "$components" = 1 ] || groups=("--het-group=0-$((components - 1))")
        # A rank that is lost ends all the others by itself; --kill-on-bad-exit also ends what has not come up yet.
        step=(--kill-on-bad-exit=1 "${groups[@]}" --distribution=block "$python" -m megatron_ppo train) ;;
    torchrun)
        if [ "$components" != 1 ]; then
            echo "train_slurm: LAUNCHER=torchrun numbers ranks by the names of nodes, not by the components of a heterogeneous job; use LAUNCHER=srun" >&2
            exit 2
        fi
        export NNODES="$SLURM_NNODES" RDZV_ID="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"
        RDZV_ENDPOINT=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p):$((20000 + 16 * SLURM_JOB_ID % 10000))
        export RDZV_ENDPOINT
        step=(--ntasks="$SLURM_NNODES" --ntasks-per-node=1 bash "$scripts/train_torchrun.sh") ;;
    *) echo "train_slurm: LAUNCHER=$LAUNCHER must be srun or torchrun" >&2; exit 2 ;;
esac

rm -f "$run_dir/PREEMPTED"  # of an earlier start: a launch that ends before it takes the folder was not preempted
code=0
srun "${step[@]}" "$@" || code=$?
# torchrun ends with 1 after a SIGTERM, whatever its ranks did; the file says what they did.
if [ -f "$run_dir/PREEMPTED" ]; then
    echo "stopped before the time limit: queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
