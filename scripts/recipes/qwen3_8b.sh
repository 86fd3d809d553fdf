#!/usr/bin/env bash
# Qwen3 8B: 2 nodes x 8 GPUs of 80 GB. One node trains, one samples.
# Expected: 67 GiB of a training GPU; a refit in 0.3 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 4 x DP 2: as Llama-3.1 8B; 8 KV heads, norms on queries and keys are held by every tensor-parallel rank.
# Rollout 8 replicas of TP 1: 16 GB of weights each.
model=qwen3_8b
nodes=2
flags=(
    --tensor-model-parallel-size 4 --sequence-parallel
    --rollout-world-size 8 --rollout-tensor-parallel-size 1
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity selective
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
