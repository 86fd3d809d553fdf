# What all recipes share; each sets `model`, `nodes` and `flags`, then sources this file with the user's arguments. `plan_flags`: further flags of
# `plan`, which a run does not get.
#
#   bash scripts/recipes/llama3.1_8b.sh [plan|show|torchrun|srun|slurm] [any flag of train]
#
#   plan       (default) meshes, memory and refit of this launch, computed on this machine: no GPU, no weights
#   show       the command line that a run would get
#   torchrun   run on this node; the same command on every node, with RDZV_ENDPOINT=HOST:PORT of one of them
#   srun       run in the allocation that this shell has (salloc, or a script of yours)
#   slurm      sbatch scripts/train_slurm.sh, with requeue before the time limit; LAUNCHER=torchrun: an agent a node
#
# Every number can be changed in two ways; an argument stands above the environment, which stands above the recipe:
#   TENSOR_MODEL_PARALLEL_SIZE=8 bash scripts/recipes/llama3.1_8b.sh plan     the flag's name in capitals; true or false for a switch
#   bash scripts/recipes/llama3.1_8b.sh plan --tensor-model-parallel-size 8
# Beside the flags:
#   NODES, GPUS_PER_NODE (8)     the launch: all their ranks
#   CPUS_PER_GPU (8)             slurm, srun: cores of each rank, for its loaders and reward processes
#   MODEL_PATH, PROMPT_DATA      required to run. `plan` takes the shape of the model that comes with the package
#   ROLLOUT_PARTITION            slurm: the rollout nodes come from this partition, as a component of their own; PARTITION: the training nodes
#   SBATCH_TIMELIMIT, SBATCH_ACCOUNT, SBATCH_PARTITION, ...     as sbatch reads them
set -euo pipefail
: "${model:?}" "${nodes:?}" "${flags:?}"  # this file is sourced by a recipe
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
. "$root/scripts/interpreter.sh"

nodes=${NODES:-$nodes}
gpus=${GPUS_PER_NODE:-8}
for number in "$nodes" "$gpus"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || { echo "recipe: NODES=$nodes and GPUS_PER_NODE=$gpus must be whole numbers above 0" >&2; exit 2; }
done
command=plan
case "${1:-}" in
    plan | show | torchrun | srun | slurm) command=$1; shift ;;
    "" | --*) ;;
    *) echo "recipe: unknown command '$1'; there is: plan, show, torchrun, srun, slurm, then flags of train" >&2; exit 2 ;;
esac

# PPO with a critic of its own and a reference, in bfloat16 with fp32 gradients and masters: what is alike for all sizes.
common=(
    --params-dtype bfloat16 --rollout-dtype bfloat16
    --critic separate --advantage-estimator gae --gamma 1.0 --gae-lambda 0.95
    --kl-coef 0.001
    --lr 1e-6 --critic-lr 1e-5 --lr-decay-style constant --lr-warmup-steps 10 --clip-grad 1.0
    --train-iters 200 --save-interval 20
    --temperature 1.0
    --reward math
    --run-dir "runs/$model"
)

# from_environment FLAG [VALUE...]...: the same, where variables of the environment are named like flags with their values; into `resolved`.
resolved=()
from_environment() {
    local flag name values
    while [ $# -gt 0 ]; do
        flag=$1 values=()
        shift
        while [ $# -gt 0 ] && [[ $1 != --* ]]; do values+=("$1"); shift; done
        name=${flag#--}
        name=${name^^}
        name=${name//-/_}
        if [ -n "${!name+set}" ]; then
            case ${#values[@]}:${!name} in
                0:true) ;;
                0:false) flag=--no-${flag#--} ;;
                0:*) echo "recipe: $name=${!name} must be true or false" >&2; exit 2 ;;
                1:*) values=("${!name}") ;;
                *) read -ra values <<<"${!name}" ;;
            esac
        fi
        resolved+=("$flag" ${values[@]+"${values[@]}"})
    done
}
from_environment "${common[@]}" "${flags[@]}"
world_size=$((nodes * gpus))

# value_of FLAG ARGUMENT...: its last value.
value_of() {
    local wanted=$1 found=""
    shift
    while [ $# -gt 0 ]; do
        case $1 in
            "$wanted") found=${2:-} ;;
            "$wanted"=*) found=${1#*=} ;;
        esac
        shift
    done
    echo "$found"
}

if [ "$command" = plan ]; then
    model_path=${MODEL_PATH:-$root/megatron_ppo/model_shapes/$model}
    exec "$python" -m megatron_ppo plan --world-size "$world_size" --ranks-per-node "$gpus" ${plan_flags[@]+"${plan_flags[@]}"} \
        --model-path "$model_path" "${resolved[@]}" "$@"
fi
for name in MODEL_PATH PROMPT_DATA; do
    flag=--${name,,}
    flag=${flag//_/-}
    given=$(value_of "$flag" "$@")
    if [ -z "$given" ]; then
        [ "$command" = show ] || [ -n "${!name:-}" ] || { echo "recipe: set $name, or give $flag: this run needs it" >&2; exit 2; }
        resolved+=("$flag" "${!name:-$name}")
    fi
done

case $command in
    show) echo "megatron_ppo train, $nodes nodes x $gpus GPUs:"; printf '%q ' "${resolved[@]}" "$@"; echo ;;
    torchrun) NNODES=$nodes NPROC_PER_NODE=$gpus RDZV_ID=${RDZV_ID:-$model} exec bash "$root/scripts/train_torchrun.sh" "${resolved[@]}" "$@" ;;
    srun)
        export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
        export SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-${CPUS_PER_GPU:-8}}"  # srun does not take it over from salloc (Slurm 22.05 on)
        exec srun --nodes "$nodes" --ntasks-per-node "$gpus" --kill-on-bad-exit=1 --distribution=block --signal TERM@600 \
            "$python" -m megatron_ppo train "${resolved[@]}" "$@" ;;
    slurm)
        tasks=$gpus cpus=${CPUS_PER_GPU:-8}
        [ "${LAUNCHER:-srun}" = srun ] || tasks=1 cpus=$((cpus * gpus))
        size() { echo "--nodes $1 --ntasks-per-node $tasks --cpus-per-task $cpus --gpus-per-node $gpus ${2:+--partition $2}"; }
        components=($(size "$nodes" "${PARTITION:-}"))
        if [ -n "${ROLLOUT_PARTITION:-}" ]; then
            if [ "${LAUNCHER:-srun}" != srun ]; then
                echo "recipe: LAUNCHER=$LAUNCHER numbers ranks by the names of nodes, not by partitions; with ROLLOUT_PARTITION use LAUNCHER=srun" >&2
                exit 2
            fi
            rollout_ranks=$(value_of --rollout-world-size "${resolved[@]}" "$@")
            rollout_nodes=$((rollout_ranks / gpus))
            if [ $((rollout_nodes * gpus)) != "$rollout_ranks" ] || [ "$rollout_nodes" = 0 ] || [ "$rollout_nodes" -ge "$nodes" ]; then
                echo "recipe: a partition of its own holds whole nodes: --rollout-world-size $rollout_ranks must be a multiple of" \
                    "GPUS_PER_NODE=$gpus, above 0 and below NODES x GPUS_PER_NODE = $world_size; or leave out ROLLOUT_PARTITION" >&2
                exit 2
            fi
            components=($(size $((nodes - rollout_nodes)) "${PARTITION:-}") : $(size "$rollout_nodes" "$ROLLOUT_PARTITION"))
        fi
        export SCRIPTS="$root/scripts"
        exec sbatch --job-name "$model" "${components[@]}" "$root/scripts/train_slurm.sh" "${resolved[@]}" "$@" ;;
esac
