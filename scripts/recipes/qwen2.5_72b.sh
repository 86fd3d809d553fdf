#!/usr/bin/env bash
# Qwen2.5 72B: 12 nodes x 8 GPUs of 80 GB. Eight nodes train, four sample.
# Expected: 49 GiB of a training GPU; a refit in 0.7 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 8 x PP 8: as Llama-3.1 70B; the larger vocabulary (152,064) adds 0.4 GB of weights to the first and the last stage (the critic has no head there).
# Rollout 8 replicas of TP 4: 36 GB of weights a GPU, 2 of the 8 KV heads each.
model=qwen2.5_72b
nodes=12
flags=(
    --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel
    --rollout-world-size 32 --rollout-tensor-parallel-size 4
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 4096
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity full
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
