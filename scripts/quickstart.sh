#!/usr/bin/env bash
# Sets up the project and runs the main job: PPO on a small model, from nothing to a learning curve.
#
#   bash scripts/quickstart.sh                        training TP=2, two vLLM replicas
#   bash scripts/quickstart.sh --mesh pp=2            another training mesh: tp, pp, vpp, dp, cp; and rollout_tp, replicas
#   bash scripts/quickstart.sh --mesh tp=2,colocated  the same two ranks train and sample
#   bash scripts/quickstart.sh --backend fsdp         FSDP2 in place of megatron-core, two ranks and two vLLM replicas
#   bash scripts/quickstart.sh --model smollm2        a pretrained SmolLM2-135M-Instruct
#   bash scripts/quickstart.sh --help                 all options; any flag of `megatron_ppo train` may follow
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in
    *" --help "* | *" -h "*) exec "${PYTHON:-python3}" scripts/quickstart.py --help ;;
    *" --model smollm2 "* | *" --model=smollm2 "*) bash scripts/setup.sh smollm2 ;;
    *) bash scripts/setup.sh ;;
esac
exec .venv/bin/python scripts/quickstart.py "$@"
