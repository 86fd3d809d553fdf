#!/usr/bin/env bash
# Qwen2.5 14B: 3 nodes x 8 GPUs of 80 GB. Two nodes train, one samples.
# Expected: 59 GiB of a training GPU; a refit in 0.6 s (plan). An iteration has 1,024 responses of at most 1,024 + 3,072 tokens, in steps of 256.
# Training TP 8 x DP 2: 40 heads and 8 KV heads divide by 8; one node holds a copy, the second one halves the optimizer's share.
# Rollout 8 replicas of TP 1: 30 GB of weights each still leave half of the memory to the KV cache.
model=qwen2.5_14b
nodes=3
flags=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --rollout-world-size 8 --rollout-tensor-parallel-size 1
    --prompts-per-iteration 1024 --samples-per-prompt 1 --global-batch-size 256 --ppo-epochs 1
    --micro-batch-size 16 --max-tokens-per-micro-batch 8192
    --max-prompt-length 1024 --max-response-length 3072
    --recompute-granularity selective
    --vllm-overrides gpu_memory_utilization 0.85
)
. "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
